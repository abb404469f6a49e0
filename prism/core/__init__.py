"""Values every layer shares: ids, units, specs, requests and the error tree. No I/O, no clock, no randomness."""
