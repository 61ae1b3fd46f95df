"""Regular expressions and JSON schemas as automata over bytes, for grammars stored in a bundle."""
