"""Request bodies of the three protocols, read into an `ApiRequest`."""
