"""Whether a chain of thought carries its answer.

Chains in, scores out: ``C`` (does the chain lead to its answer?), ``F*`` (does a judge hold to the
chain's own continuation against altered ones, beyond its taste?), ``R = C * F*``, and the step that
breaks. Importing this package imports no torch.
"""

from planaria.faithfulness.chains import Chain, Labels, Question
from planaria.faithfulness.control import correct
from planaria.faithfulness.estimate import score_chain
from planaria.faithfulness.judges.calculator import CalculatorJudge
from planaria.faithfulness.judges.panel import PanelJudge
from planaria.faithfulness.judges.protocol import Compare, Judge, Supports, Verdict, Verify
from planaria.faithfulness.meta import meta_evaluate
from planaria.faithfulness.perturb import RulePerturber
from planaria.faithfulness.readers import read_chains, read_questions
from planaria.faithfulness.run import score_chains
from planaria.faithfulness.scores import ChainScore, Settings
from planaria.faithfulness.select import evaluate

__all__ = [
    "CalculatorJudge",
    "Chain",
    "ChainScore",
    "Compare",
    "Judge",
    "Labels",
    "PanelJudge",
    "Question",
    "RulePerturber",
    "Settings",
    "Supports",
    "Verdict",
    "Verify",
    "correct",
    "evaluate",
    "meta_evaluate",
    "read_chains",
    "read_questions",
    "score_chain",
    "score_chains",
]
