"""From text to the batch of a step: the encoding, documents, shards, the order in which they are read."""
