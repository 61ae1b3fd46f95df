"""General questions with short answers: topics x question forms. Knows the questions, not the answers (see
distill.py)."""

from __future__ import annotations

import random

CONCEPTS = """photosynthesis gravity inflation democracy evaporation friction an atom a molecule a planet a
comet a volcano an earthquake a rainbow the moon the sun electricity magnetism a battery a magnet a vaccine
a virus bacteria an enzyme DNA a gene evolution an ecosystem a food chain recycling compost a desert a
rainforest a glacier a river a tide a hurricane thunder lightning fog snow a cloud the ozone layer global
warming solar power wind power nuclear energy a telescope a microscope a thermometer a compass a computer
the internet an algorithm a database a password encryption a browser a spreadsheet open source software
machine learning a robot a satellite a rocket a train a bicycle an engine a bridge a budget interest a loan
a tax a contract a mortgage insurance supply and demand a bank a vote a law a constitution a treaty a museum
a library a novel a poem a metaphor an adjective a verb a haiku jazz an orchestra a piano a guitar a
sculpture a painting a photograph architecture chess football yoga meditation a vitamin protein a calorie
fiber bread cheese tea coffee chocolate honey rice pasta a vegetable a fruit a bee a whale an owl a spider a
dinosaur a fossil a diamond gold iron water oxygen carbon a triangle a prime number a fraction a percentage
an average probability"""
PLACES = """Paris Rome Tokyo Cairo London Berlin Madrid Sydney Mumbai Lima Nairobi Toronto Athens Vienna
Istanbul Moscow Bangkok Dublin Oslo Lisbon Brazil Japan Egypt Iceland Kenya Canada Norway Peru India Greece"""
SKILLS = """learning a language; sleeping better; saving money; cooking rice; writing an email;
studying for an exam; running a marathon; growing tomatoes; taking photos; public speaking; making friends;
packing a suitcase; cleaning a kitchen; staying focused; reading more books; playing the guitar;
baking bread; managing stress; drinking more water; planning a trip; training a dog; riding a bike;
giving feedback; preparing for an interview; keeping plants alive; learning to draw; waking up early;
organizing a desk; remembering names; eating healthy food""".replace("\n", " ").split(";")
SENTENCES = """i want the report now; you are late again; this food is bad; give me the keys;
the meeting was boring; he don't know nothing; send me that file; your plan will not work;
we was at the park yesterday; stop calling me; the movie were great; she go to school every day;
i can't come today; move your car; this price is too high; me and him is friends; close the window;
you made a mistake; i need help with this; the room is too cold""".replace("\n", " ").split(";")

CONCEPT_FORMS = (
    "What is {x}? Answer in one sentence.", "Explain {x} in one sentence.", "Define {x} briefly.",
    "In one short sentence, what is {x}?",
    "Tell me one fact about {x}.", "Write one sentence about {x}.", "Why does {x} matter? Keep it short.",
    "Describe {x} in a few words.",
    "Explain {x} to a child in one sentence.",
    "Give a short definition of {x}.", "What should I know about {x}? One sentence.",
)  # fmt: skip
PLACE_FORMS = (
    "Where is {x}? Answer in one sentence.", "What is {x} known for? One sentence.",
    "Tell me one fact about {x}.",
    "Write one sentence about the food in {x}.", "What is the weather like in {x}? Keep it short.",
    "Name one thing to see in {x}.",
    "Why do people visit {x}? One sentence.",
)  # fmt: skip
SKILL_FORMS = (
    "Give me one tip for {x}.", "What is the first step in {x}? One sentence.",
    "Why is {x} hard? Keep it short.",
    "Give a beginner one piece of advice about {x}.", "In one sentence, how do I get better at {x}?",
    "What helps with {x}? Answer briefly.",
)  # fmt: skip
SENTENCE_FORMS = (
    "Rewrite this politely: {x}", "Correct the grammar: {x}", "Say this in a friendlier way: {x}",
    "Make this sentence longer: {x}",
    "Rewrite this more formally: {x}",
)  # fmt: skip
RESERVED_FORMS = 2  # the last forms of a family are held out; so is every sixth topic


def _concepts() -> list[str]:
    words = CONCEPTS.split()
    joined: list[str] = []
    articles = {"a", "an", "the"}
    tails = {
        "chain", "layer", "warming", "power", "energy", "source", "software", "learning",
        "and", "demand", "number",
    }  # fmt: skip
    for word in words:
        if joined and (joined[-1] in articles or word in tails or joined[-1].endswith(" and")):
            joined[-1] += " " + word
        else:
            joined.append(word)
    return joined


def questions(held_out: bool) -> list[str]:
    """Every question of one side of the split, in a fixed shuffled order."""
    families = (
        (_concepts(), CONCEPT_FORMS),
        (PLACES.split(), PLACE_FORMS),
        ([s.strip() for s in SKILLS], SKILL_FORMS),
        ([s.strip() for s in SENTENCES], SENTENCE_FORMS),
    )
    made: list[str] = []
    for topics, forms in families:
        side = forms[-RESERVED_FORMS:] if held_out else forms[:-RESERVED_FORMS]
        for index, topic in enumerate(topics):
            if (
                index % 2 == 1 if held_out else index % 6 != 5
            ):  # held out: unseen form, and a third of the topics unseen
                made += [form.format(x=topic) for form in side]
    made = list(dict.fromkeys(made))
    random.Random(7).shuffle(made)
    return made
