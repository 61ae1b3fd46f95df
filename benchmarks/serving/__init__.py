"""Load for a server with OpenAI's HTTP interface: clients, arrivals, figures."""
