"""The APIs that agents speak: how each writes a request, an answer, a stream and an error."""
