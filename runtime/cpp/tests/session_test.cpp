#include "conformance.hpp"
