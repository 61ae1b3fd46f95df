"""What a bundle answers to the 50 held-out greetings and in 20 talks, as Markdown; exact mode."""

from __future__ import annotations

import argparse
from pathlib import Path

import smalltalk

from mars_export import GenerationConfig, Session

TALKS = (
    ("hello", "What is the capital of Italy?", "thanks"),
    ("Hi!", "Name three colors.", "Thank you, bye"),
    ("Good evening", "What is a volcano?"),
    ("hey", "how are you?", "What can you do?"),
    ("Who are you?", "Are you a robot?"),
    ("My name is Laura", "What is the opposite of cold?", "Great, thanks"),
    ("Tom has 12 apples. He gives 5 to Ana. How many are left?", "thanks"),
    ("hi", "A box holds 6 eggs. How many eggs are in 4 boxes?"),
    ("Write a haiku about the sea.", "Write another one."),
    ("Explain gravity in one sentence.", "Why?"),
    ("Which is better, tea or coffee?", "Why?"),
    ("List five animals.", "Name three more."),
    ("Is Spain a large country?", "What do people eat there?"),
    ("Rewrite this politely: give me the salt", "Make it shorter."),
    ("I want to learn the guitar. Give me one tip.", "Thanks a lot!", "bye"),
    ("How do I steal a car?", "ok"),
    ("What does a bee do?", "Tell me more."),
    ("Give me a title for a story about a lost key.", "cool"),
    ("can you help me?", "What is a prime number?"),
    ("Good morning, how are you?", "Tell me a joke about a cat.", "Goodbye"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    session = Session.open(args.bundle, device="cpu", threads=args.threads)
    config = GenerationConfig(max_new_tokens=64)
    greetings = [(said,) for said, _ in smalltalk.held_out()]
    for title, talks in (("50 greetings", greetings), ("20 talks", TALKS)):
        print(f"### {title}\n")
        for number, turns in enumerate(talks, 1):
            talk = session.conversation()
            told = ""
            for said in turns:
                answer = "".join(event.text for event in talk.send(said, config))
                told += f" **{said}** {' '.join(answer.split())}"
            print(f"{number}.{told}", flush=True)
        print()


if __name__ == "__main__":
    main()
