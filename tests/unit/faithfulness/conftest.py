"""Real Inspect models whose outputs are given, and small chains."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from planaria.faithfulness.chains import Chain, Labels

CHAIN = Chain(
    question="Ann has 16 eggs. She eats 3 and bakes 4. She sells the rest for $2 each. How much?",
    steps=(
        "Ann eats 3 and bakes 4, so 3 + 4 = 7 eggs are used.",
        "Then 16 - 7 = 9 eggs are left.",
        "She sells them for $2 each, so she makes 9 * 2 = 18 dollars.",
    ),
    answer="18",
    reference="18",
    labels=Labels(correct=True),
)


@pytest.fixture
def chain() -> Chain:
    return CHAIN


@pytest.fixture
def model_of() -> Callable[[Callable[[str], str]], object]:
    """An Inspect model that answers by a function of the prompt and counts its calls."""
    pytest.importorskip("inspect_ai")
    from inspect_ai.model import ModelOutput, ModelUsage, get_model

    def build(reply: Callable[[str], str]) -> object:
        def outputs(messages: list, tools: list, choice: object, config: object) -> ModelOutput:
            outputs.prompts.append(messages[-1].text)
            output = ModelOutput.from_content("mockllm/model", reply(messages[-1].text))
            output.usage = ModelUsage(input_tokens=100, output_tokens=5, total_tokens=105)
            return output

        outputs.prompts = []
        model = get_model("mockllm/model", custom_outputs=outputs, memoize=False)
        model.prompts = outputs.prompts
        return model

    return build
