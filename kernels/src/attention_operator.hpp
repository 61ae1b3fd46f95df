#pragma once

struct OrtCustomOp;

// The operator `mars_export::Attention`, with the code for the processor that `instructions` names.
const OrtCustomOp* attention_operator(const char* instructions);
