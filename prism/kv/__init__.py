"""KV outside of engines: pieces of sequences, by content, in host memory and in what other devices lend."""
