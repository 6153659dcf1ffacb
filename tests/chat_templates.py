"""Chat templates of the kinds that published models have, over the tiny tokenizer's words; w80 is <think>, w81
</think>."""

from pathlib import Path

from data_prep.toy_language import TEMPLATE

THINK, ENOUGH = "w80", "w81"


def turns(content: str, tail: str = "") -> str:
    """A template over all messages, with `content` as the expression for a message's text."""
    return (
        f"{{% for m in messages %}}{{% set c = m['content'] %}}{content}"
        "{{ '<|im_start|> ' + m['role'] + ' \n ' + c + ' <|im_end|> \n ' }}{% endfor %}" + tail
    )


HEADER = "{% if add_generation_prompt %}{{ '<|im_start|> assistant \n ' }}{% endif %}"
CUT = f"{{% if '{ENOUGH} ' in c %}}{{% set c = c.split('{ENOUGH} ')[-1] %}}{{% endif %}}"
LATER = "m['role'] == 'assistant' and not loop.last"
NOT_THINKING = (
    "{% if enable_thinking is defined and not enable_thinking %}{{ '" + f"{THINK} {ENOUGH} " + "' }}{% endif %}"
)
# as Qwen3: earlier answers lose their thinking, the last one gets an empty pair of tags if it has none
QWEN3 = turns(
    f"{{% if {LATER} %}}{CUT}{{% elif m['role'] == 'assistant' and '{THINK}' not in c %}}"
    f"{{% set think = m['reasoning_content'] + ' ' if m['reasoning_content'] is defined else '' %}}"
    f"{{% set c = '{THINK} ' + think + '{ENOUGH} ' + c %}}{{% endif %}}",
    HEADER.replace("{% endif %}", NOT_THINKING + "{% endif %}"),
)
TEMPLATES = {
    "ChatML": TEMPLATE,
    "drops earlier thinking": turns(f"{{% if {LATER} %}}{CUT}{{% endif %}}", HEADER),
    "Qwen3": QWEN3,
    "no generation prompt": turns(""),
    "no generation prompt, an end of text": turns("", "{{ '<pad>' }}"),
    "no header": (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' <|im_end|>' }}{% else %}"
        "{{ ' <|im_start|> ' + m['content'] + ' \n' }}{% endif %}{% endfor %}"
    ),
    "a header after every question": turns("").replace(
        "{% endfor %}",
        "{% if m['role'] == 'user' and loop.last %}{{ '<|im_start|> assistant \n ' }}{% endif %}{% endfor %}",
    ),
    "marks the last turn": turns("{% if loop.last %}{{ 'w50 ' }}{% endif %}", HEADER),
    "empties earlier answers": turns(f"{{% if {LATER} %}}{{% set c = '' %}}{{% endif %}}", HEADER),
}
NO_HEADER_TO_FIND = {
    "answers left out": turns("").replace("messages %}", "messages if m['role'] != 'assistant' %}"),
    "answers first": turns("").replace("messages %}", "messages | reverse %}"),
    "answers in capitals": turns("{% if m['role'] == 'assistant' %}{% set c = c | title %}{% endif %}"),
}


def with_template(folder: Path, expert: Path, template: str) -> Path:
    """The same expert with another chat template."""
    for file in expert.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text(template)
    return folder
