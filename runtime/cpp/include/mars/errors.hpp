// The errors of libmars. Each message says what is wrong, where, and what to do about it.
#pragma once

#include <stdexcept>
#include <string>

#include <mars/export.hpp>

namespace mars {

/// Base class of all errors.
class MARS_API Error : public std::runtime_error {
  public:
    explicit Error(const std::string& message, const char* kind = "failed", const char* at_fault = "")
        : std::runtime_error(message), code(kind), field(at_fault) {}

    const char* const code;  ///< for programs, as in Python: one of the codes that docs/serving.md lists
    const char* const field; ///< the setting at fault, or "prompt"; "" if there is none
};

/// The bundle is damaged, unsafe, or of a format this version does not read.
class MARS_API BundleError : public Error {
  public:
    using Error::Error;
};

/// The bundle is fine but cannot run here, or the request cannot be served.
///
/// If a call that answers throws this class itself, the request is invalid. Subclasses mean that the request is valid.
class MARS_API SessionError : public Error {
  public:
    explicit SessionError(const std::string& message, const char* kind = "invalid_value", const char* at_fault = "")
        : Error(message, kind, at_fault) {}
};

/// A step failed on the device. The same request may succeed later, or never again in this session.
class MARS_API DeviceError : public SessionError {
  public:
    explicit DeviceError(const std::string& message) : SessionError(message, "failed") {}
};

/// The device has failed permanently: nothing runs on it in this process any more. Restart the process.
class MARS_API DeviceLost : public DeviceError {
  public:
    using DeviceError::DeviceError;
};

/// Not enough memory for the request now; a shorter or later one may succeed.
class MARS_API MemoryError : public SessionError {
  public:
    explicit MemoryError(const std::string& message) : SessionError(message, "out_of_memory") {}
};

/// The request is fine, but there is no room for it now: too many requests wait, or too many of its client.
class MARS_API Overloaded : public SessionError {
  public:
    Overloaded(const std::string& message, double seconds) : SessionError(message, "overloaded"), retry_after(seconds) {}

    const double retry_after; ///< estimated seconds until there is room
};

} // namespace mars
