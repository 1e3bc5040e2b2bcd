"""The service as an application of Ray Serve: `serve run attention_on_ray:app`, or serve.yaml beside this file."""

from __future__ import annotations

from ray import serve

from attention_service.app import from_environment


@serve.deployment(
    ray_actor_options={"num_cpus": 1},
    max_ongoing_requests=100,
    autoscaling_config={"min_replicas": 1, "max_replicas": 8, "target_ongoing_requests": 4},
    health_check_period_s=10,
)
@serve.ingress(from_environment)
class AttentionService:
    """Answers as the service does. Settings are environment variables of the replicas (docs/settings.md)."""


app = AttentionService.bind()  # type: ignore[attr-defined]  # Ray Serve makes a Deployment of the class
