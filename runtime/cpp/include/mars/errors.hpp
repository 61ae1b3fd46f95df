// The closed family of errors. Each message says what is wrong, where, and what to do about it; twin of runtime/errors.py.
#pragma once

#include <stdexcept>

namespace mars {

/// Anything that a user of libmars can put right. Nothing else is thrown on bad input but std::bad_alloc.
class Error : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

/// The bundle is damaged, unsafe, or of a format or kind that this version does not read.
class BundleError : public Error {
  public:
    using Error::Error;
};

/// The bundle is fine but cannot run here, or the request cannot be served.
class SessionError : public Error {
  public:
    using Error::Error;
};

}  // namespace mars
