"""A BCQ folder: manifest, shards, reader, writer, validator."""
