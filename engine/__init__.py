"""The engine: token ids in, token ids out. Owns the device and the model; knows no text, HTTP or metrics format."""
