"""The decoding loop: prompt token ids in, answer token ids out."""
