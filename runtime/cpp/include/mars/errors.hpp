// The closed family of errors. Each message says what is wrong, where, and what to do about it.
#pragma once

#include <stdexcept>

#include <mars/export.hpp>

namespace mars {

/// Anything that a user of libmars can put right.
class MARS_API Error : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

/// The bundle is damaged, unsafe, or of a format this version does not read.
class MARS_API BundleError : public Error {
  public:
    using Error::Error;
};

/// The bundle is fine but cannot run here, or the request cannot be served.
class MARS_API SessionError : public Error {
  public:
    using Error::Error;
};

} // namespace mars
