// The mark of what the shared library shows: everything else in it is hidden.
#pragma once

#define MARS_API __attribute__((visibility("default")))
