{{/*
The Serve configuration: the same document as deployments/*.yaml. Engine replicas and live settings stand under
`deployments:` and not in `args:`, since changed arguments restart every engine and these do not. With autoscaling
Serve sets the number of engines itself, and the bounds are arguments.
*/}}
{{- define "flare.serveConfig" -}}
{{- $v := .Values -}}
{{- $preset := include "flare.preset" . | fromYaml -}}
{{- $engine := merge (dict "checkpoint" (include "flare.checkpoint" .) "recipe" $preset.recipe "tensor_parallel_size" $v.tensorParallelSize "device" $v.device) $v.engine -}}
{{- $placement := merge (dict "graceful_shutdown_s" $v.longestGenerationSeconds) $v.engineDeployment -}}
{{- if $v.engineDeployment.autoscaling -}}
{{- $placement = merge (dict "replicas" (int64 $v.replicas)) $placement -}}
{{- end -}}
{{- $ingress := $v.httpReplicas -}}
{{- if include "flare.keysSecret" . -}}
{{- $ingress = merge (dict "keys_file" (printf "%s/%s" (include "flare.keysPath" .) $v.apiKeys.key)) $v.httpReplicas -}}
{{- end }}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: {{ $v.http.port }}
  keep_alive_timeout_s: {{ $v.http.keepAliveSeconds }}
logging_config:
  encoding: {{ $v.logging.encoding }}
  log_level: {{ $v.logging.level }}
  enable_access_log: {{ $v.logging.accessLog }}
applications:
  - name: flare
    route_prefix: /
    import_path: flare_ray.frontend.app:build
    args:
      model_name: {{ $v.model.name | quote }}
      compat_metrics: {{ $v.compatMetrics }}
      engine:
        {{- toYaml $engine | nindent 8 }}
      engine_deployment:
        {{- toYaml $placement | nindent 8 }}
      ingress:
        {{- toYaml $ingress | nindent 8 }}
    deployments:
      - name: Engine
        {{- if not $v.engineDeployment.autoscaling }}
        num_replicas: {{ $v.replicas }}
        {{- end }}
        user_config: {{ toJson $v.engineLive }}
{{- end -}}
