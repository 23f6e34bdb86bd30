//! Envoy's configuration, cut down from what Istio gives its sidecars: the same listeners, filters and ways to reach
//! the application, without discovery.

use serde_json::{Value, json};
use std::net::SocketAddr;

/// What differs between Pods.
#[derive(Clone, Debug, Default)]
pub struct Bootstrap {
    /// Inbound ports that go to another address, as a Sidecar's `defaultEndpoint` asks for.
    pub inbound: Vec<(u16, SocketAddr)>,
    /// Inbound ports whose bytes pass through as they are.
    pub tcp_ports: Vec<u16>,
    /// An outbound port for which Envoy originates TLS.
    pub tls_port: Option<u16>,
    /// There is no pilot-agent: Envoy itself says on 15021 whether it is ready.
    pub alone: bool,
    /// Each inbound request has a line on stdout.
    pub access_log: bool,
}

impl Bootstrap {
    /// Istio's bootstrap and its virtual listeners; JSON is YAML, which `--config-yaml` takes.
    pub fn config(&self) -> Value {
        let mut clusters = vec![
            cluster("inbound", as_the_client(passed_on())),
            cluster("outbound", json!({ "type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED" })),
            cluster("agent", fixed("agent", "127.0.0.1:15020".parse().unwrap())),
            cluster("admin", fixed("admin", "127.0.0.1:15000".parse().unwrap())),
        ];
        let mut inbound = vec![http_chain("inbound", &json!({}), "/")];
        if self.access_log {
            let connections = inbound[0].pointer_mut("/filters/0/typed_config").expect("a filter");
            connections["access_log"] = json!([{
                "name": "envoy.access_loggers.file",
                "typed_config": { "@type": STDOUT, "path": "/dev/stdout" },
            }]);
        }
        for (port, endpoint) in &self.inbound {
            let name = format!("inbound-{port}");
            clusters.push(cluster(&name, as_the_client(fixed(&name, *endpoint))));
            inbound.push(http_chain(&name, &json!({ "destination_port": port }), "/"));
        }
        for port in &self.tcp_ports {
            let name = format!("inbound-tcp-{port}");
            clusters.push(cluster(&name, passed_on()));
            inbound.push(tcp_chain(&name, &json!({ "destination_port": port })));
        }
        let mut outbound = vec![tcp_chain("outbound", &json!({}))];
        if let Some(port) = self.tls_port {
            // Envoy as a client stops at 1.2 unless told; Istio tells it.
            let tls_1_3 = json!({ "tls_params": { "tls_maximum_protocol_version": "TLSv1_3" } });
            clusters.push(cluster(
                "tls",
                json!({
                    "type": "ORIGINAL_DST",
                    "lb_policy": "CLUSTER_PROVIDED",
                    "transport_socket": {
                        "name": "envoy.transport_sockets.tls",
                        "typed_config": { "@type": TLS, "common_tls_context": tls_1_3 },
                    },
                }),
            ));
            outbound.push(tcp_chain("tls", &json!({ "destination_port": port })));
        }
        let mut health = http_chain(if self.alone { "admin" } else { "agent" }, &json!({}), "/healthz/ready");
        if self.alone {
            let route = "/filters/0/typed_config/route_config/virtual_hosts/0/routes/0/route";
            health.pointer_mut(route).expect("a route")["prefix_rewrite"] = json!("/ready");
        }
        json!({
            "admin": { "address": address("127.0.0.1", 15000) },
            "static_resources": {
                "clusters": clusters,
                "listeners": [
                    listener("virtualOutbound", 15001, "OUTBOUND", true, &outbound),
                    listener("virtualInbound", 15006, "INBOUND", true, &inbound),
                    listener("health", 15021, "UNSPECIFIED", false, &[health]),
                    listener("metrics", 15090, "UNSPECIFIED", false, &[http_chain("admin", &json!({}), "/stats/prometheus")]),
                ],
            },
        })
    }
}

/// To the address and port that the client asked for.
fn passed_on() -> Value {
    json!({
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        // Istio binds to these so that its own rules let the connection pass to the application.
        "upstream_bind_config": {
            "source_address": { "address": "127.0.0.6", "port_value": 0 },
            "extra_source_addresses": [{ "address": { "address": "::6", "port_value": 0 } }],
        },
    })
}

/// With the client's version of HTTP, as Istio asks the application.
fn as_the_client(mut cluster: Value) -> Value {
    let versions = json!({ "http_protocol_options": {}, "http2_protocol_options": {} });
    cluster["typed_extension_protocol_options"] = json!({
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions":
            { "@type": UPSTREAM_HTTP, "use_downstream_protocol_config": versions },
    });
    cluster
}

const UPSTREAM_HTTP: &str = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
const TLS: &str = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext";
const STDOUT: &str = "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog";
const HTTP: &str =
    "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
const TCP: &str = "type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy";
const ROUTER: &str = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router";
const ORIGINAL_DST: &str =
    "type.googleapis.com/envoy.extensions.filters.listener.original_dst.v3.OriginalDst";

fn address(address: &str, port: u16) -> Value {
    json!({ "socket_address": { "address": address, "port_value": port } })
}

/// A cluster with one endpoint that never changes.
fn fixed(name: &str, endpoint: SocketAddr) -> Value {
    let endpoint = json!({ "endpoint": { "address": address(&endpoint.ip().to_string(), endpoint.port()) } });
    json!({
        "type": "STATIC",
        "load_assignment": { "cluster_name": name, "endpoints": [{ "lb_endpoints": [endpoint] }] },
    })
}

fn cluster(name: &str, mut rest: Value) -> Value {
    rest["name"] = json!(name);
    rest["connect_timeout"] = json!("10s");
    // Istio's limits are as good as none.
    let most = u32::MAX;
    rest["circuit_breakers"] = json!({ "thresholds": [
        { "max_connections": most, "max_pending_requests": most, "max_requests": most, "max_retries": most }
    ] });
    rest
}

fn listener(name: &str, port: u16, direction: &str, redirected: bool, chains: &[Value]) -> Value {
    let filter =
        json!({ "name": "envoy.filters.listener.original_dst", "typed_config": { "@type": ORIGINAL_DST } });
    json!({
        "name": name,
        "address": address("0.0.0.0", port),
        "additional_addresses": [{ "address": address("::", port) }],
        "traffic_direction": direction,
        "listener_filters": if redirected { vec![filter] } else { Vec::new() },
        "filter_chains": chains,
    })
}

fn tcp_chain(cluster: &str, matching: &Value) -> Value {
    let config = json!({ "@type": TCP, "stat_prefix": cluster, "cluster": cluster });
    let filter = json!({ "name": "envoy.filters.network.tcp_proxy", "typed_config": config });
    json!({ "name": cluster, "filter_chain_match": matching, "filters": [filter] })
}

fn http_chain(cluster: &str, matching: &Value, prefix: &str) -> Value {
    // No timeout: Istio sets none either.
    let route = json!({ "match": { "prefix": prefix }, "route": { "cluster": cluster, "timeout": "0s" } });
    let config = json!({
        "@type": HTTP,
        "stat_prefix": cluster,
        "route_config": { "virtual_hosts": [{ "name": cluster, "domains": ["*"], "routes": [route] }] },
        "http_filters": [{ "name": "envoy.filters.http.router", "typed_config": { "@type": ROUTER } }],
    });
    let filter = json!({ "name": "envoy.filters.network.http_connection_manager", "typed_config": config });
    json!({ "name": cluster, "filter_chain_match": matching, "filters": [filter] })
}
