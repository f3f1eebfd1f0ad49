"""The router: OpenAI's HTTP API on one side, prefill and decode workers on the other.

`process` joins what a router is made of. `backends` have requests generated, by our own daemons or by HTTP servers of
vLLM or SGLang, and each chooses the two workers of one. `front` reads, bounds and answers requests, whatever generates.
`fleet` has who comes and goes. Each imports only those that are named after it.
"""
