{{/*
One pod template. Arguments: root, kind (head, engine or http), pod (its values).
*/}}
{{- define "flare.pod" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
{{- $pod := .pod -}}
{{- $engine := eq .kind "engine" -}}
metadata:
  labels:
    {{- /* Nothing that changes with the chart's version: it would count as a changed cluster. */}}
    {{- include "flare.selector" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .kind }}
  {{- with $pod.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "flare.serviceAccount" $root }}
  automountServiceAccountToken: {{ and (eq .kind "head") $v.autoscaler.enabled }}
  terminationGracePeriodSeconds: {{ add (int64 $v.longestGenerationSeconds) 30 }}
  {{- with $v.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . | quote }}
    {{- end }}
  {{- end }}
  {{- if $v.autoscaler.enabled }}
  restartPolicy: Never
  {{- end }}
  {{- with $pod.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- with $pod.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with $pod.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "flare.podSecurity" $root | nindent 4 }}
  {{- if and (ne .kind "head") $v.weights.fetch.enabled }}
  initContainers:
    - name: wait-for-weights
      image: {{ include "flare.image" $root }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      command: [flare-ray]
      args:
        {{- include "flare.fetchArguments" $root | nindent 8 }}
        - --wait-s
        - {{ $v.weights.fetch.waitSeconds | quote }}
      securityContext:
        {{- include "flare.containerSecurity" $root | nindent 8 }}
      resources:
        limits: {cpu: "1", memory: 512Mi}
        requests: {cpu: 100m, memory: 256Mi}
      volumeMounts:
        - {name: weights, mountPath: {{ $v.weights.mountPath }}, readOnly: true}
  {{- end }}
  containers:
    - name: ray-{{ .kind }}
      image: {{ include "flare.image" $root }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      ports:
        {{- if eq .kind "head" }}
        - {name: gcs, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        {{- end }}
        - {name: serve, containerPort: {{ $v.http.port }}}
        - {name: metrics, containerPort: 8080}
      env:
        {{- include "flare.env" $root | nindent 8 }}
        {{- with $pod.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      resources:
        {{- $resources := dict "cpu" (toString $pod.cpus) "memory" $pod.memory }}
        {{- if and $engine (gt (int64 $pod.gpus) 0) }}
        {{- $_ := set $resources $pod.gpuResource (toString $pod.gpus) }}
        {{- end }}
        limits:
          {{- toYaml $resources | nindent 10 }}
        requests:
          {{- toYaml $resources | nindent 10 }}
      {{- with $pod.livenessProbe }}
      livenessProbe:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $pod.readinessProbe }}
      readinessProbe:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- include "flare.containerSecurity" $root | nindent 8 }}
      volumeMounts:
        {{- include "flare.mounts" . | nindent 8 }}
        {{- with $pod.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- include "flare.volumes" . | nindent 4 }}
    {{- with $pod.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* The chart's own mounts of a pod. Arguments as for flare.pod. */}}
{{- define "flare.mounts" -}}
{{- $v := .root.Values -}}
- {name: shm, mountPath: /dev/shm}
- {name: ray-logs, mountPath: /tmp/ray}
{{- if ne $v.weights.source "image" }}
- {name: weights, mountPath: {{ $v.weights.mountPath }}, readOnly: true}
{{- end }}
{{- if and (include "flare.keysSecret" .root) (ne .kind "head") }}
- {name: api-keys, mountPath: {{ include "flare.keysPath" .root }}, readOnly: true}
{{- end }}
{{- end -}}

{{/* The chart's own volumes of a pod. Arguments as for flare.pod. */}}
{{- define "flare.volumes" -}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .pod.shm }}}
- name: ray-logs
  emptyDir: {}
{{- if ne .root.Values.weights.source "image" }}
{{ include "flare.weightsVolume" .root }}
{{- end }}
{{- if and (include "flare.keysSecret" .root) (ne .kind "head") }}
- name: api-keys
  secret: {secretName: {{ include "flare.keysSecret" .root | quote }}, defaultMode: 0440}
{{- end }}
{{- end -}}
