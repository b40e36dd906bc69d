"""BibTeX of papers that several methods use. A paper of one method is in that method's module.

A method's module has its references as ``REFERENCE``: an entry, or a tuple of entries.
``specjax.cite`` prints those of the methods that were used.
"""

from __future__ import annotations

import importlib
import re
from types import ModuleType

from specjax import registry
from specjax.errors import UserError

# The packages whose modules ``cite`` takes: drafters, rules, controllers, shapes of trees, and
# ways to decode ("beams").
_CITED = (
    "specjax.drafters",
    "specjax.accept",
    "specjax.control",
    "specjax.topology",
    "specjax.decode",
)

LEVIATHAN2023FAST = """\
@inproceedings{leviathan2023fast,
  title = {{Fast Inference from Transformers via Speculative Decoding}},
  author = {Leviathan, Yaniv and Kalman, Matan and Matias, Yossi},
  booktitle = {International Conference on Machine Learning},
  year = {2023},
  eprint = {2211.17192},
  archiveprefix = {arXiv},
}"""

CHEN2023ACCELERATING = """\
@misc{chen2023accelerating,
  title = {{Accelerating Large Language Model Decoding with Speculative Sampling}},
  author = {Chen, Charlie and Borgeaud, Sebastian and Irving, Geoffrey and
            Lespiau, Jean-Baptiste and Sifre, Laurent and Jumper, John},
  year = {2023},
  eprint = {2302.01318},
  archiveprefix = {arXiv},
}"""

XIA2023SPECULATIVE = """\
@inproceedings{xia2023speculative,
  title = {{Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq
            Generation}},
  author = {Xia, Heming and Ge, Tao and Wang, Peiyi and Chen, Si-Qing and Wei, Furu and
            Sui, Zhifang},
  booktitle = {Findings of the Association for Computational Linguistics: EMNLP},
  year = {2023},
  eprint = {2203.16487},
  archiveprefix = {arXiv},
}"""

MIAO2024SPECINFER = """\
@inproceedings{miao2024specinfer,
  title = {{SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative
            Inference and Verification}},
  author = {Miao, Xupeng and Oliaro, Gabriele and Zhang, Zhihao and Cheng, Xinhao and
            Wang, Zeyu and Zhang, Zhengxin and Wong, Rae Ying Yee and Zhu, Alan and
            Yang, Lijie and Shi, Xiaoxiang and Shi, Chunan and Chen, Zhuoming and
            Arfeen, Daiyaan and Abhyankar, Reyna and Jia, Zhihao},
  booktitle = {Architectural Support for Programming Languages and Operating Systems},
  year = {2024},
  eprint = {2305.09781},
  archiveprefix = {arXiv},
}"""

CHEN2024SEQUOIA = """\
@inproceedings{chen2024sequoia,
  title = {{Sequoia: Scalable and Robust Speculative Decoding}},
  author = {Chen, Zhuoming and May, Avner and Svirschevski, Ruslan and Huang, Yu-Hsun and
            Ryabinin, Max and Jia, Zhihao and Chen, Beidi},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2024},
  eprint = {2402.12374},
  archiveprefix = {arXiv},
}"""

JEON2024RECURSIVE = """\
@misc{jeon2024recursive,
  title = {{Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without
            Replacement}},
  author = {Jeon, Wonseok and Gagrani, Mukul and Goel, Raghavv and Park, Junyoung and
            Lee, Mingu and Lott, Christopher},
  year = {2024},
  eprint = {2402.14160},
  archiveprefix = {arXiv},
}"""

SUN2023SPECTR = """\
@inproceedings{sun2023spectr,
  title = {{SpecTr: Fast Speculative Decoding via Optimal Transport}},
  author = {Sun, Ziteng and Suresh, Ananda Theertha and Ro, Jae Hun and Beirami, Ahmad and
            Jain, Himanshu and Yu, Felix},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2023},
  eprint = {2310.15141},
  archiveprefix = {arXiv},
}"""

LI2024EAGLE2 = """\
@inproceedings{li2024eagle2,
  title = {{EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees}},
  author = {Li, Yuhui and Wei, Fangyun and Zhang, Chao and Zhang, Hongyang},
  booktitle = {Empirical Methods in Natural Language Processing},
  year = {2024},
  eprint = {2406.16858},
  archiveprefix = {arXiv},
}"""

CHENG2024RECURRENT = """\
@misc{cheng2024recurrent,
  title = {{Recurrent Drafter for Fast Speculative Decoding in Large Language Models}},
  author = {Cheng, Yunfei and Zhang, Aonan and Zhang, Xuanyu and Wang, Chong and Wang, Yi},
  year = {2024},
  eprint = {2403.09919},
  archiveprefix = {arXiv},
}"""

CAI2024MEDUSA = """\
@inproceedings{cai2024medusa,
  title = {{Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads}},
  author = {Cai, Tianle and Li, Yuhong and Geng, Zhengyang and Peng, Hongwu and
            Lee, Jason D. and Chen, Deming and Dao, Tri},
  booktitle = {International Conference on Machine Learning},
  year = {2024},
  eprint = {2401.10774},
  archiveprefix = {arXiv},
}"""

STERN2018BLOCKWISE = """\
@inproceedings{stern2018blockwise,
  title = {{Blockwise Parallel Decoding for Deep Autoregressive Models}},
  author = {Stern, Mitchell and Shazeer, Noam and Uszkoreit, Jakob},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2018},
  eprint = {1811.03115},
  archiveprefix = {arXiv},
}"""

OLIARO2025SUFFIXDECODING = """\
@inproceedings{oliaro2025suffixdecoding,
  title = {{SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications}},
  author = {Oliaro, Gabriele and Jia, Zhihao and Campos, Daniel and Qiao, Aurick},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2025},
  eprint = {2411.04975},
  archiveprefix = {arXiv},
}"""

ELHOUSHI2024LAYERSKIP = """\
@inproceedings{elhoushi2024layerskip,
  title = {{LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding}},
  author = {Elhoushi, Mostafa and Shrivastava, Akshat and Liskovich, Diana and Hosmer, Basil and
            Wasti, Bram and Lai, Liangzhen and Mahmoud, Anas and Acun, Bilge and Agarwal, Saurabh
            and Roman, Ahmed and Aly, Ahmed A. and Chen, Beidi and Wu, Carole-Jean},
  booktitle = {Annual Meeting of the Association for Computational Linguistics},
  year = {2024},
  eprint = {2404.16710},
  archiveprefix = {arXiv},
}"""

SPECTOR2023ACCELERATING = """\
@misc{spector2023accelerating,
  title = {{Accelerating LLM Inference with Staged Speculative Decoding}},
  author = {Spector, Benjamin and R{\\'e}, Christopher},
  year = {2023},
  eprint = {2308.04623},
  archiveprefix = {arXiv},
}"""

CHEN2024CASCADE = """\
@inproceedings{chen2024cascade,
  title = {{Cascade Speculative Drafting for Even Faster LLM Inference}},
  author = {Chen, Ziyi and Yang, Xiaocong and Lin, Jiacheng and Sun, Chenkai and
            Chang, Kevin Chen-Chuan and Huang, Jie},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2024},
  eprint = {2312.11462},
  archiveprefix = {arXiv},
}"""

KIM2023SPECULATIVE = """\
@inproceedings{kim2023speculative,
  title = {{Speculative Decoding with Big Little Decoder}},
  author = {Kim, Sehoon and Mangalam, Karttikeya and Moon, Suhong and Malik, Jitendra and
            Mahoney, Michael W. and Gholami, Amir and Keutzer, Kurt},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2023},
  eprint = {2302.07863},
  archiveprefix = {arXiv},
}"""

ZHANG2024DRAFT = """\
@inproceedings{zhang2024draft,
  title = {{Draft \\& Verify: Lossless Large Language Model Acceleration via Self-Speculative
            Decoding}},
  author = {Zhang, Jun and Wang, Jue and Li, Huan and Shou, Lidan and Chen, Ke and Chen, Gang and
            Mehrotra, Sharad},
  booktitle = {Annual Meeting of the Association for Computational Linguistics},
  year = {2024},
  eprint = {2309.08168},
  archiveprefix = {arXiv},
}"""

MAMOU2024DYNAMIC = """\
@inproceedings{mamou2024dynamic,
  title = {{Dynamic Speculation Lookahead Accelerates Speculative Decoding of Large Language
            Models}},
  author = {Mamou, Jonathan and Pereg, Oren and Korat, Daniel and Berchansky, Moshe and
            Timor, Nadav and Wasserblat, Moshe and Schwartz, Roy},
  booktitle = {NeurIPS Efficient Natural Language and Speech Processing Workshop},
  year = {2024},
  eprint = {2405.04304},
  archiveprefix = {arXiv},
}"""

ZHANG2025DRAFT = """\
@inproceedings{zhang2025draft,
  title = {{Draft Model Knows When to Stop: Self-Verification Speculative Decoding for Long-Form
            Generation}},
  author = {Zhang, Ziyin and Xu, Jiahao and Liang, Tian and Chen, Xingyu and He, Zhiwei and
            Wang, Rui and Tu, Zhaopeng},
  booktitle = {Empirical Methods in Natural Language Processing},
  year = {2025},
  eprint = {2411.18462},
  archiveprefix = {arXiv},
}"""

AGRAWAL2024ADAEDL = """\
@inproceedings{agrawal2024adaedl,
  title = {{AdaEDL: Early Draft Stopping for Speculative Decoding of Large Language Models via an
            Entropy-based Lower Bound on Token Acceptance Probability}},
  author = {Agrawal, Sudhanshu and Jeon, Wonseok and Lee, Mingu},
  booktitle = {NeurIPS Efficient Natural Language and Speech Processing Workshop},
  year = {2024},
  eprint = {2410.18351},
  archiveprefix = {arXiv},
}"""


def of(module: ModuleType) -> dict[str, str]:
    """BibTeX key -> entry, of a method's module; empty for a module without ``REFERENCE``."""
    stored = getattr(module, "REFERENCE", ())
    texts = (stored,) if isinstance(stored, str) else stored
    entries = [entry.strip() for text in texts for entry in re.split(r"\n(?=@)", text)]
    return {entry.partition("{")[2].partition(",")[0]: entry for entry in entries}


def cite(*names: str) -> str:
    """The BibTeX entries of the methods that were used: ``cite("medusa", "recursive")``.

    Names are drafters, acceptance rules, controllers, modules of ``specjax.topology`` ("search"
    is Sequoia, "dynamic" the trees of EAGLE-2, ReDrafter and DDTree), and "beams". Entries are in
    the order of the names, each once, with an empty line between two; a method without a
    publication ("none") has none. Raises UserError for an unknown name; the message has the nearest
    names.
    """
    entries: dict[str, str] = {}
    for name in names:
        known = [registry.modules(package) for package in _CITED]
        places = [modules[name] for modules in known if isinstance(name, str) and name in modules]
        if not places:
            every = sorted({each for modules in known for each in modules})
            hint = registry.nearest(str(name), every)
            raise UserError(f"there is no drafter, rule or controller {name!r}{hint}")
        for place in places:
            entries |= of(importlib.import_module(place))
    return "\n\n".join(entries.values())
