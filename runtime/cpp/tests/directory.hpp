// A directory for a bundle that a test writes, breaks and opens.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include <mars/errors.hpp>

#include "bundle/bundle.hpp"
#include "bundle/sha256.hpp"
#include "manifest.hpp"

/// A directory that is gone at the end of the test.
struct Directory {
    std::filesystem::path path = std::filesystem::temp_directory_path() / ("mars-test-" + std::to_string(getpid()));
    std::filesystem::path cache = path.string() + "-cache"; // of this user, for the test
    Directory() {
        std::filesystem::create_directories(path);
        setenv("MARS_EXPORT_CACHE", cache.c_str(), 1);
    }
    ~Directory() {
        std::filesystem::remove_all(path);
        std::filesystem::remove_all(cache);
        unsetenv("MARS_EXPORT_CACHE");
    }
    Directory(const Directory&) = delete;
    Directory& operator=(const Directory&) = delete;
    void write(const std::string& name, const std::string& data) const { std::ofstream(path / name, std::ios::binary) << data; }

    std::string read(const std::string& name) const {
        std::ifstream file(path / name, std::ios::binary);
        return {std::istreambuf_iterator<char>(file), {}};
    }

    /// A bundle whose files are right.
    void write_bundle() const {
        nlohmann::json manifest = valid();
        for (nlohmann::json& entry : manifest["files"]) {
            const auto name = entry["path"].get<std::string>();
            const std::string data = "content of " + name;
            write(name, data);
            entry["size"] = data.size();
            entry["sha256"] = mars::sha256(data);
        }
        write("manifest.json", manifest.dump());
        write("manifest.sha256", mars::sha256(manifest.dump()) + "  manifest.json\n");
    }

    /// Another content of a file, whose hash the manifest has, as a hostile author would make it.
    void relist(const std::string& name, const std::string& data) const {
        nlohmann::json manifest = nlohmann::json::parse(read("manifest.json"));
        write(name, data);
        for (nlohmann::json& entry : manifest["files"])
            if (entry["path"] == name) {
                entry["size"] = data.size();
                entry["sha256"] = mars::sha256(data);
            }
        write("manifest.json", manifest.dump());
        write("manifest.sha256", mars::sha256(manifest.dump()) + "  manifest.json\n");
    }

    std::string refusal(mars::Verify how = mars::Verify::once, bool safe = false) const {
        try {
            mars::open_bundle(path, how, safe);
            return "";
        } catch (const mars::BundleError& error) {
            return error.what();
        }
    }
};
