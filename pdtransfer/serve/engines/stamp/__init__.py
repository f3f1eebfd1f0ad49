"""An engine without a model and without torch: each token of an answer depends on every byte of the request's KV.

A token's *stamp* is a 64-bit digest of the token and of all tokens before it. Prefill fills the KV rows of a token with
words that follow from its stamp and from the row's component, layer, kind and head. Decode reads the rows of the
request out of the arena, digests their bytes as they lie there, and picks the next token by that digest. So an answer
is that of a single process only if every byte of every row was right.

What a digest is: a row of one head has a 64-bit sum of its words, each multiplied by a key of its own. The row's sum
is mixed with its number, and the digest of a head is the sum of its rows. One changed word changes it for certain, any
other change with a chance of 1 - 2**-32 or better. Sums of rows can be replaced one by one, so that a step costs what
it reads, not what the request holds.

What is read when:

- every row of the prompt, before the request's first step
- every row that a step writes, in that step, after it was written
- at each step, rows that were read before, in turn: all rows of a request of up to 256 rows, otherwise at least a
  sixteenth of them. So a byte that changes under a running request changes its tokens within 16 steps
- every row once more at the end of the request, for its digest of the KV

With the option `top_k`, a step also picks positions of the request by its digest. Its tokens depend on the bytes of
these rows where a step reads them: in the hot pool, for a HiSparse request.

All arithmetic is on integers modulo 2**64. So tokens are the same on every host, for every chunk, batch, page size and
layout, and for every division of the heads among ranks.
"""
