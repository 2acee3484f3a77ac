set -e
ALL="num_envs=4 total_steps=64 seed=3 device=cpu runtime=sync runtime.sim_threads=1 runtime.decisions=2 runtime.eval_every=1
  runtime.eval_episodes=2 eval_episodes=4 algo.epochs=1 algo.num_minibatches=1 policy.critic_hidden=[16]
  task.max_episode_steps=8"
GEMMA="num_hidden_layers:2,num_attention_heads:4,num_key_value_heads:2,head_dim:8,intermediate_size:24"
VISION="hidden_size:12,num_hidden_layers:1,num_attention_heads:2,intermediate_size:16,patch_size:8,vision_use_head:false"
VLM="{projection_dim:16,text_config:{hidden_size:16,$GEMMA},vision_config:{$VISION}}"
python -m embodied.train out=runs/flow task=reach policy=flow policy.actor_hidden=[16,16] policy.head_hidden=[16] $ALL
python -m embodied.train out=runs/vla_tiny task=tabletop policy=vla_tiny policy.image_size=16 policy.horizon=4 \
  policy.execute=4 policy.denoise_steps=2 \
  policy.model="{max_state_dim:40,max_action_dim:5,vlm_config:$VLM,dit_config:{hidden_size:20,$GEMMA}}" $ALL
python -m embodied.export run=runs/flow out=bundles/onnx episodes=2
python -m embodied.export run=runs/vla_tiny out=bundles/transformers episodes=2 layout=transformers
