"""What stands around and between the clauses of a request: frames, openings, greetings, endings, joins."""

from __future__ import annotations

FRAMES = {
    "free": (
        "I'd like you to {}",
        "I want you to {}",
        "I need you to {}",
        "it would be great if you could {}",
        "it would be nice if you would {}",
        "do me a favor and {}",
        "be so kind and {}",
        "can we {}",
        "let's {}",
        "go ahead and {}",
        "{}, will you",
        "{}, would you",
        "{} if you can",
        "is it possible to {}",
        "any chance you could {}",
        "I think we should {}",
        "I was going to ask you to {}",
        "can I ask you to {}",
        "would it be possible to {}",
        "you could {}",
        "don't forget to {}",
        "quick, {}",
        "when you have a moment, {}",
        "{} as soon as you can",
        "what I need is this: {}",
        "may I ask you to {}",
        "just {}",
        "first of all, {}",
    ),
    "reserved": (
        "I was wondering if you could {}",
        "would you be able to {}",
        "if you don't mind, {}",
        "it's time to {}",
    ),
}
OPENINGS = (  # of an order
    "",
    "",
    "",
    "please ",
    "can you ",
    "could you ",
    "hey, ",
    "ok, ",
    "would you ",
    "hi, please ",
    "now ",
    "could you please ",
)
GREETINGS = (
    "",
    "",
    "",
    "",
    "",
    "hey, ",
    "ok, ",
    "hi, ",
    "so, ",
    "well, ",
    "listen, ",
    "please, ",
)  # of a remark
ENDINGS = ("", "", "", "", " please", ", thanks", ".", " now", " for me", ", thank you")
JOINS = (" and ", " and then ", ", then ", ", and ", "; also ", " and also ")
