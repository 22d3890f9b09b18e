"""Prompts of a wanted length, from a passage that is always there."""

from __future__ import annotations

from octavo.model.tokenizer import Tokenizer

PASSAGE = """\
The press stood in a long room above the river, and in winter the windows were white with frost until noon. Every
sheet that left it was folded three times, so that one side of paper became eight leaves, and the apprentices called
the small books that came of it octavos. A folio needed a table; an octavo went into a coat pocket, was read on the
ferry, lent to a neighbour and forgotten at an inn. The printer kept an account of every sheet: how many were wetted,
how many spoiled, how many were folded and how many sewn. Nothing was thrown away before it was written down. When a
customer asked why his book was late, the answer was in the ledger, with the date, the weather and the name of the man
who had mixed the ink. "A page that is set once", he used to say, "should never be set again", and so the standing
type of popular passages was kept in trays along the wall, tied with string and labelled, ready for the next edition.
"""


def prompt_ids(tokenizer: Tokenizer, length: int, variant: int = 0, *, vocab_size: int) -> list[int]:
    """`length` token ids of running text; another `variant` starts with another number and shares no prefix block.

    A model without a tokenizer gets ids that count through its vocabulary.
    """
    if tokenizer.hf is None:
        return [(variant * 7 + 3 * i) % vocab_size for i in range(length)]
    ids = tokenizer.encode(f"{variant}. {PASSAGE}")
    while len(ids) < length:
        ids += tokenizer.encode(PASSAGE, False)
    return ids[:length]
