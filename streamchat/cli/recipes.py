"""Instructions with a name: `--prompt @name`. Some come with the program, others from the settings.

`@name:words` puts the words where the instruction has `{}`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from streamchat.errors import UsageError

PLACE = "{}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """An instruction.

    Attributes:
        text: What the model is told.
        mode: Of `pipe`, where the user names none; None for the usual one.
        words: What stands in the place of `{}` where the user says nothing.
        meaning: What it is for.
    """

    text: str
    mode: Literal["notes", "reply"] | None = None
    words: str | None = None
    meaning: str = ""


RECIPES: Mapping[str, Recipe] = {
    "translate": Recipe(
        "Translate each message to {}. Answer with the translation alone.",
        "reply",
        "English",
        "each line in another language: @translate:French",
    ),
    "clean": Recipe(
        "Each message is a raw caption. Write it again with punctuation and capital letters, "
        "without filler words and repetitions. Change nothing else, and answer with the text "
        "alone.",
        "reply",
        meaning="captions as one would write them",
    ),
    "tag": Recipe(
        "Name the topics of each message: one to three short tags in lower case, with commas. "
        "Answer with the tags alone.",
        "reply",
        meaning="topics of each line",
    ),
    "alert": Recipe(
        "Each message comes from a log or a conversation that nobody watches. If a person should "
        "look at it, answer ALERT: and why, in one short sentence. Otherwise answer OK.",
        "reply",
        meaning="what a person should look at",
    ),
    "minutes": Recipe(
        "You take the minutes of a meeting. The user sends its transcript, which goes on and on. "
        "When asked, write down the topics, who said what, the decisions, and the tasks: who does "
        "what until when. Be brief and invent nothing.",
        "notes",
        meaning="topics, decisions and tasks of a meeting",
    ),
}


def find(prompt: str | None, own: Mapping[str, str]) -> Recipe:
    """What a prompt stands for: a recipe by its name, or itself.

    Args:
        prompt: As the user gave it. `@@` at its beginning is an `@` that names nothing.
        own: The user's recipes, which win over those that come with the program.

    Raises:
        UsageError: If no recipe has the name, or its words are missing or one too many.
    """
    if prompt is None or not prompt.startswith("@"):
        return Recipe(prompt or "")
    if prompt.startswith("@@"):
        return Recipe(prompt[1:])
    name, colon, words = prompt[1:].partition(":")
    recipe = Recipe(own[name]) if name in own else RECIPES.get(name)
    if recipe is None:
        known = ", ".join(f"@{known}" for known in sorted({*own, *RECIPES}))
        raise UsageError(f"--prompt: no recipe is called '@{name}'; there are {known}")
    if PLACE not in recipe.text:
        if colon:
            raise UsageError(f"--prompt: @{name} takes no words after it, got '{words}'")
        return recipe
    filling = words.strip() or recipe.words
    if not filling:
        raise UsageError(f"--prompt: @{name} needs words, as in @{name}:WORDS")
    return Recipe(recipe.text.replace(PLACE, filling), recipe.mode)
