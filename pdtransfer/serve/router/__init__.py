"""The router: OpenAI's HTTP API on one side, prefill and decode workers on the other."""
