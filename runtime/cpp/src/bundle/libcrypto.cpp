// libcrypto by dlopen, so that libmars starts on systems without it.
#include "bundle/libcrypto.hpp"

#include <dlfcn.h>
#include <initializer_list>

namespace mars {

namespace {

template <typename Function>
bool bind(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
}

bool bind_all(void* library, Libcrypto& found) {
    return bind(library, "EVP_MD_CTX_new", found.context_new) && bind(library, "EVP_MD_CTX_free", found.context_free) &&
           bind(library, "EVP_sha256", found.sha256) && bind(library, "EVP_DigestInit_ex", found.init) &&
           bind(library, "EVP_DigestUpdate", found.update) && bind(library, "EVP_DigestFinal_ex", found.final);
}

} // namespace

const Libcrypto* Libcrypto::find() {
    static const Libcrypto found = [] {
        for (const char* name : {"libcrypto.so.3", "libcrypto.so.1.1"}) {
            void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
            Libcrypto functions;
            if (library != nullptr && bind_all(library, functions)) return functions;
        }
        return Libcrypto();
    }();
    return found.final != nullptr ? &found : nullptr;
}

} // namespace mars
