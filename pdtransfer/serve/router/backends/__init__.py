"""What generates behind a router: daemons of our own, or HTTP servers of vLLM or SGLang."""
