"""An opened bundle on a device: answers, streams, conversations, and what is kept in the cache directory."""
