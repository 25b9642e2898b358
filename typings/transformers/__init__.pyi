"""The names of transformers that umbra and its tests use, from where transformers defines them.

Its own `__init__` imports all its models, which costs the type checker a third of its time.
"""

from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.generation.logits_process import LogitsProcessor as LogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteria as StoppingCriteria
from transformers.modeling_utils import AttentionInterface as AttentionInterface
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.deepseek_v3.configuration_deepseek_v3 import (
    DeepseekV3Config as DeepseekV3Config,
)
from transformers.models.granite.configuration_granite import GraniteConfig as GraniteConfig
from transformers.models.lfm2.configuration_lfm2 import Lfm2Config as Lfm2Config
from transformers.models.llama.configuration_llama import LlamaConfig as LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM as LlamaForCausalLM
from transformers.models.mamba.configuration_mamba import MambaConfig as MambaConfig
from transformers.models.mistral.configuration_mistral import MistralConfig as MistralConfig
from transformers.models.nemotron.configuration_nemotron import NemotronConfig as NemotronConfig
from transformers.models.phi3.configuration_phi3 import Phi3Config as Phi3Config
from transformers.models.phi3.modeling_phi3 import Phi3ForCausalLM as Phi3ForCausalLM
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config as Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM as Qwen2ForCausalLM
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config as Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM as Qwen3ForCausalLM
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig as Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeForCausalLM as Qwen3MoeForCausalLM,
)
from transformers.tokenization_utils_tokenizers import (
    PreTrainedTokenizerFast as PreTrainedTokenizerFast,
)
from transformers.trainer_callback import TrainerCallback as TrainerCallback

__version__: str
