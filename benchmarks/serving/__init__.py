"""Load for a server that speaks OpenAI's HTTP interface, ours or another: clients, arrivals, figures."""
