"""Whether the gateway is ready, how it fares, and how it drains."""
