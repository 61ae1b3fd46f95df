"""Answers that follow a grammar: the tokens that it allows, forces and drafts."""
