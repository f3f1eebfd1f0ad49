"""A model of a whole fleet under a trace of requests: the router's placement and decode's admission run as they are,
engines and links are rates. Pure: traces come as lines, time is virtual, and nothing is drawn."""
