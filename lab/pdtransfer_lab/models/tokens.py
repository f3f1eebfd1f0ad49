"""The reference model's vocabulary: ids 0 to 255 are bytes, 256 is EOS. Imports no torch, so a router may use it."""

EOS = 256
VOCABULARY = 257
