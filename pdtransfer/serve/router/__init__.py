"""The router: OpenAI's HTTP API on one side, prefill and decode workers on the other.

`process` joins what a router is made of. `backends` have requests generated, by our own daemons or by HTTP servers of
vLLM or SGLang. `front` reads, bounds and answers requests, whatever generates; `policy` chooses the two workers of one.
`fleet` has what is known of workers, and who comes and goes. Each imports only those that are named after it.
"""
