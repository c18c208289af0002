"""The snippets of W5XDE's and Guava's documents as they stand there, by document and line. What they leave open
is filled in by ``test_snippets``; what they have wrong is mended there, and listed here.

What a document shows of its own insides (how it configures a socket, packs a message) is no snippet for a user: what
is here in its place is in ``items.txt``.
"""

from __future__ import annotations

#: The one change that a user makes.
W5XDE = {"from w5xde import": "from w5xde_async.facade.w5xde import"}
GUAVA = {
    "from distrib_train_net import": "from w5xde_async.facade.guava import",
    "python -m distrib_train_net.": "python -m w5xde_async.facade.guava.",
}

#: (document, line, what is wrong there, what a user writes instead)
MISTAKES = [
    ("Using the W5XDE Distributed Training System", 18, "a function of a comment alone", "its body"),
    ("Using the W5XDE Distributed Training System", 79, "the node is made and never trains", "node.train()"),
    ("WIIIIIDE (W5XDE)", 38, "model and dataset come from nowhere", "a model and a dataset"),
    ("WIIIIIDE (W5XDE)", 46, "MODEL_CLASS comes from nowhere", "a class of models"),
    ("Guava", 84, "torch is not imported", "import torch"),
    ("Guava", 95, "your_dataloader comes from nowhere", "a DataLoader"),
    ("Guava", 114, "model and dataloader come from nowhere", "a model and a DataLoader"),
    ("Guava", 151, "large_model and dataloader come from nowhere", "a model and a DataLoader"),
    ("Guava", 225, "torch is not imported", "import torch"),
    ("Guava", 300, "nn is not imported", "import torch.nn as nn"),
    ("Guava", 307, "output comes from nowhere", "what the model computes"),
    ("Guava", 359, "the orchestrator comes from nowhere", "an orchestrator of that config"),
]

# -- Using the W5XDE Distributed Training System

#: Line 7.
SERVER = """
import torch
from w5xde import CentralServer

# Your PyTorch model
class YourModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        # ... your model definition ...

# Your PyTorch dataset
class YourDataset(torch.utils.data.Dataset):
    def __init__(self):
        # ... your dataset definition ...

# Initialize server
server = CentralServer(
    model=YourModel(),
    dataset=YourDataset(),
    batch_size=32,
    ip="0.0.0.0",  # Allow external connections
    port=5555
)
server.start()
"""

#: Line 34.
NODE_SETUP = """
import torch
from w5xde import TrainingNode

# Must match server's model architecture
class YourModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        # ... same model definition as server ...

# Basic setup
node = TrainingNode(
    model=YourModel(),
    server_address=('server_ip', 5555),
    collect_metrics=True,  # Optional: enable performance metrics
    compress_gradients=False  # Recommended: keep compression disabled
)
node.train()
"""

#: Line 58.
NODE_WITH_METRICS = """
def track_loss(loss, batch_id):
    print(f"Batch {batch_id}: loss = {loss:.4f}")

def track_network(sent, received, comp_time, net_time, orig_size, comp_size):
    print(f"Network stats:")
    print(f"  Throughput: {(sent + received) / (1024 * net_time):.2f} KB/s")
    print(f"  Compression time: {comp_time:.3f}s")
    print(f"  Network time: {net_time:.3f}s")
    print(f"  Compression ratio: {orig_size/comp_size:.2f}x")

node = TrainingNode(
    model=YourModel(),
    server_address=('server_ip', 5555),
    collect_metrics=True
)
node.train(loss_callback=track_loss, network_callback=track_network)
"""

#: Line 79.
NODE_THAT_COMPRESSES = """
node = TrainingNode(
    model=YourModel(),
    compress_gradients=True,
    batch_gradients=True
)
"""

# -- WIIIIIDE (W5XDE)

#: Line 36.
SHORT_SERVER = """
from w5xde import CentralServer

server = CentralServer(model, dataset, batch_size=128, ip="0.0.0.0", port=5555)
server.start()
"""

#: Line 44.
NODE_OF_A_CLASS = """
from w5xde import TrainingNode

node = TrainingNode(MODEL_CLASS)
node.train()
"""

# -- Guava

#: Line 59.
LOCAL = """
from distrib_train_net import DistributedConfig, Orchestrator
import torch.nn as nn

# Your model
class MyTransformer(nn.Module):
    def __init__(self, vocab_size, d_model):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.transformer = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(d_model, nhead=8),
            num_layers=6
        )
        self.output = nn.Linear(d_model, vocab_size)
    
    def forward(self, x):
        x = self.embedding(x)
        x = self.transformer(x)
        return self.output(x)

# Configure distributed training
config = DistributedConfig(
    vocab_size=50000,
    d_model=512,
    batch_size=32,
    data_parallel=True,  # Use data parallelism
    num_workers=torch.cuda.device_count()
)

# Create orchestrator
orchestrator = Orchestrator(config)

# Register your model
model = MyTransformer(config.vocab_size, config.d_model)
orchestrator.register_model(model)

# Start training
orchestrator.start_training(your_dataloader, num_epochs=10)
"""  # noqa: W293

#: Line 102.
MULTI_MACHINE = """
from distrib_train_net import DistributedConfig, Orchestrator

config = DistributedConfig(
    vocab_size=50000,
    d_model=512,
    num_workers=4,  # Total GPUs across all machines
    master_ip="192.168.1.100",
    master_port=29500,
    data_parallel=True
)

orchestrator = Orchestrator(config, mode='orchestrator')
orchestrator.register_model(model)
orchestrator.start_training(dataloader, num_epochs=10)
"""

#: Line 120.
WORKER = """
from distrib_train_net import NetworkWorker, DistributedConfig

config = DistributedConfig.from_env()  # Load from environment

# Start worker process
worker = NetworkWorker(
    gpu_id=0,  # Local GPU ID
    config=config,
    master_ip="192.168.1.100",
    master_port=29500
)

worker.connect_and_train()  # Auto-reconnects on failures
"""

#: Line 138.
IN_PIECES = """
config = DistributedConfig(
    vocab_size=50000,
    d_model=4096,  # Large model
    n_layers=48,
    num_workers=4,
    model_parallel=True,  # Split layers across GPUs
    pipeline_parallel=True,  # Enable pipelining
    micro_batches=4  # Pipeline micro-batches
)

orchestrator = Orchestrator(config)
orchestrator.register_model(large_model)
orchestrator.start_training(dataloader, num_epochs=10)
"""

#: Line 160.
VARIABLES = """
# Parallelism Strategy
export DATA_PARALLEL=1          # Enable data parallelism (default: 1)
export MODEL_PARALLEL=0         # Enable model parallelism (default: 0)
export PIPELINE_PARALLEL=0      # Enable pipeline parallelism (default: 0)
export TENSOR_PARALLEL=0        # Enable tensor parallelism (default: 0)

# Pipeline Configuration
export MICRO_BATCHES=4          # Number of micro-batches (default: 4)
export TENSOR_PARALLEL_SIZE=2   # GPUs for tensor parallel group (default: 2)

# Communication Timeouts
export ACT_TIMEOUT_SEC=60       # Activation timeout (0 = no timeout)
export ACK_TIMEOUT_SEC=30       # Acknowledgment timeout
export RESENDS_MAX=3            # Max resend attempts
export RESEND_PROBE_SEC=5       # Resend probe interval

# Optimization
export ALLOW_ACT_REUSE=0        # Cache activation reuse (default: 0)
export ACT_CACHE_STEPS=256      # Activation cache size

# Logging
export COMPACT_LOG=1            # Compact logging (default: 1)
export LOG_STEP_EVERY=100       # Log interval
export LOG_ACT=0                # Log activations (default: 0)
"""

#: Line 189.
CONFIGURATION = """
from distrib_train_net import DistributedConfig

config = DistributedConfig(
    # Model architecture
    vocab_size=50257,
    d_model=768,
    n_heads=12,
    n_layers=12,
    d_ff=3072,
    max_seq_len=1024,
    dropout=0.1,
    
    # Training hyperparameters
    batch_size=16,
    learning_rate=3e-4,
    weight_decay=0.01,
    max_grad_norm=1.0,
    use_amp=False,
    
    # Distributed setup
    num_workers=4,
    master_ip="localhost",
    master_port=29500,
    
    # Parallelism strategy
    data_parallel=True,
    model_parallel=False,
    pipeline_parallel=False,
    tensor_parallel=False,
    
    # Checkpointing
    checkpoint_dir="./checkpoints",
    save_interval=1000,
)

# Auto-adapt to available GPUs
config.adapt_to_gpus(torch.cuda.device_count())
"""  # noqa: W293

#: Line 283.
LOADER = """
from torch.utils.data import DataLoader

# Your custom dataset
dataset = YourDataset(...)
dataloader = DataLoader(dataset, batch_size=32, shuffle=True)

# Use with orchestrator
orchestrator = Orchestrator(config)
orchestrator.register_model(model)
orchestrator.start_training(dataloader, num_epochs=10)
"""

#: Line 298.
OWN_MODEL = """
from distrib_train_net import DistributedConfig, Orchestrator

class MyCustomModel(nn.Module):
    def __init__(self):
        super().__init__()
        # Your architecture
        
    def forward(self, x):
        # Your forward pass
        return output

# Register with framework
model = MyCustomModel()
config = DistributedConfig(...)
orchestrator = Orchestrator(config)
orchestrator.register_model(model)
"""  # noqa: W293

#: Line 320.
LAUNCH = """
#!/bin/bash
# launch_worker.sh

export CUDA_VISIBLE_DEVICES=0,1  # GPUs to use
export MASTER_IP=192.168.1.100
export MASTER_PORT=29500

python -m distrib_train_net.workers.network_worker \\
    --gpu-id 0 \\
    --master-ip $MASTER_IP \\
    --master-port $MASTER_PORT
"""

#: Line 352.
MEMORY = """
# Enable gradient checkpointing for large models
config = DistributedConfig(
    use_amp=True,  # Mixed precision training
    max_grad_norm=1.0,  # Gradient clipping
)

# Monitor memory usage
orchestrator.enable_memory_profiling()
"""

#: Line 365.
BATCH_SIZES = """
# Effective batch size in data parallelism
effective_batch_size = config.batch_size * config.num_workers

# For pipeline parallelism
effective_batch_size = config.batch_size * config.micro_batches
"""

#: Line 377.
TIMEOUTS = """
# Increase timeouts
config.activation_timeout = 120.0  # 2 minutes
config.ack_timeout = 60.0

# Enable retries
config.max_resends = 5
config.resend_probe_interval = 10.0
"""

#: Line 389.
LACK_OF_MEMORY = """
# Reduce batch size
config.batch_size = 8

# Enable gradient checkpointing
# (implement in your model)

# Use mixed precision
config.use_amp = True
"""
