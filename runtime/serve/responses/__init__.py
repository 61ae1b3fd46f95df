"""Answering an `ApiRequest`: admission, growing choices, and their form in each protocol."""
