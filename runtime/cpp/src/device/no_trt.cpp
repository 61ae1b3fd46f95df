// A build without TensorRT: engines do not fit, and the reason is said.
#include <mars/errors.hpp>

#include "device/here.hpp"

namespace mars {

Here look_around() { return {this_platform(), "", "", "", "", "", ""}; }

std::unique_ptr<Backend> open_engine(const Bundle& bundle, const Variant& variant) {
    throw SessionError(bundle.path.string() + ": variant " + variant.name + " needs a libmars that was built with TensorRT");
}

} // namespace mars
