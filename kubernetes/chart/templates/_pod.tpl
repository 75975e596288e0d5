{{- define "consort.image" -}}
{{- with .Values.image }}{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end }}{{ end -}}
{{- end -}}

{{/* The container's resources: those of the values, and GPUs. */}}
{{- define "consort.resources" -}}
{{- $limits := deepCopy .resources.limits -}}
{{- if .gpus }}{{ $_ := set $limits .gpuResource (toString .gpus) }}{{ end -}}
{{- toYaml (dict "requests" .resources.requests "limits" $limits) -}}
{{- end -}}

{{/* A pod's template. root; component: its label; container: its name; of: the values of its group; ports of a head. */}}
{{- define "consort.pod" -}}
{{- $values := .root.Values -}}
{{- $head := eq .component "head" -}}
metadata:
  labels: {app.kubernetes.io/name: {{ .root.Release.Name }}, app.kubernetes.io/component: {{ .component }}}
spec:
  terminationGracePeriodSeconds: 150
  securityContext:
    runAsNonRoot: true
    runAsUser: 1000
    fsGroup: 1000
    seccompProfile: {type: RuntimeDefault}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - {name: {{ . }}}
    {{- end }}
  {{- end }}
  {{- range $key := list "nodeSelector" "tolerations" "affinity" }}
  {{- with index $.of $key }}
  {{ $key }}: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  volumes:
    - name: weights
      persistentVolumeClaim: {claimName: {{ $values.weights.claim | default (printf "%s-weights" .root.Release.Name) }}}
  containers:
    - name: ray-{{ $head | ternary "head" "worker" }}
      image: {{ include "consort.image" .root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      securityContext:
        allowPrivilegeEscalation: false
        capabilities: {drop: [ALL]}
      env:
        - {name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, value: "consort.deployments.http.proxy:middlewares"}
        # Longer than http.drain_s, and shorter than the grace period.
        - {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: "130"}
        {{- if $values.requireApiKey }}
        - {name: CONSORT_API_KEY, valueFrom: {secretKeyRef: {name: {{ $values.apiKey.secret }}, key: {{ $values.apiKey.key }}}}}
        {{- end }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef: {name: {{ $values.huggingFace.secret }}, key: {{ $values.huggingFace.key }}, optional: true}
        - {name: HF_HOME, value: /weights/hugging-face} # downloads, for all pods and for the next ones
        - {name: XDG_CACHE_HOME, value: /weights/cache} # converted .gguf files
        {{- with .of.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      volumeMounts:
        - {name: weights, mountPath: /weights}
      ports:
        {{- if $head }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        {{- end }}
        - {name: serve, containerPort: 8000}
        - {name: metrics, containerPort: 8080}
      resources: {{ include "consort.resources" (merge (dict "gpuResource" $values.gpuResource) .of) | nindent 8 }}
{{- end -}}
