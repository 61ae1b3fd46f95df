// The closed family of errors. Each message says what is wrong, where, and what to do about it.
#pragma once

#include <stdexcept>
#include <string>

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
///
/// From a call that answers, this class itself says that the request is wrong; the two below say that it is not.
class MARS_API SessionError : public Error {
  public:
    using Error::Error;
};

/// A step failed on the device: the same request may be answered another time, or never again by this session.
class MARS_API DeviceError : public SessionError {
  public:
    using SessionError::SessionError;
};

/// The device has failed for good: no request of this process will be answered on it any more. Start the process again.
class MARS_API DeviceLost : public DeviceError {
  public:
    using DeviceError::DeviceError;
};

/// There is no memory for the request now; a shorter one, or a later one, may find some.
class MARS_API MemoryError : public SessionError {
  public:
    using SessionError::SessionError;
};

/// Nothing is wrong with the request, there is no room for it now: too many wait, or too many of its client.
class MARS_API Overloaded : public SessionError {
  public:
    Overloaded(const std::string& message, double seconds) : SessionError(message), retry_after(seconds) {}

    const double retry_after; ///< seconds from now there may be room (a guess from how long answers took)
};

} // namespace mars
