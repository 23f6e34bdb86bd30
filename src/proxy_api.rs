//! Requests to pilot-agent and Envoy: over loopback only, bounded in time and size.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use nix::libc;
use ureq::config::Config;
use ureq::http::{Request, Uri};
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{NextTimeout, TcpConnector};
use ureq::{Agent, Error};

/// A request takes at most this long, as in `pilot-agent wait`.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(500);
/// A head longer than this is no answer. Bodies are not read at all.
const LONGEST_HEAD: usize = 16 * 1024;

/// A URL of the proxy's: plain HTTP on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url(Uri);

impl Url {
    /// Where Istio's proxy says that it is ready.
    #[must_use]
    pub fn ready() -> Url {
        Url(Uri::from_static("http://127.0.0.1:15021/healthz/ready"))
    }

    /// Tells pilot-agent to drain Envoy without an end, and to exit at once on a later SIGTERM (since Istio 1.21). From
    /// loopback only.
    #[must_use]
    pub fn agent_drain() -> Url {
        Url(Uri::from_static("http://127.0.0.1:15020/drain"))
    }

    /// Tells Envoy to ask its inbound clients to leave, over its drain time, and to go on accepting for ever.
    #[must_use]
    pub fn envoy_drain() -> Url {
        Url(Uri::from_static("http://127.0.0.1:15000/drain_listeners?inboundonly&graceful&skip_exit"))
    }

    /// Where pilot-agent is asked to end Envoy and itself.
    #[must_use]
    pub fn agent_quit() -> Url {
        Url(Uri::from_static("http://127.0.0.1:15020/quitquitquit"))
    }

    /// Checks a URL. Names are never resolved: `localhost` is taken as what it means.
    ///
    /// # Errors
    /// What was expected instead.
    pub fn parse(text: &str) -> Result<Url, String> {
        let expected = || "an http:// URL of 127.0.0.1, [::1] or localhost".to_string();
        let uri: Uri = text.parse().map_err(|_| expected())?;
        let Some(host @ ("127.0.0.1" | "[::1]" | "localhost")) = uri.host() else { return Err(expected()) };
        // The parser lets a user name stand, and takes a port that is too large for none.
        let authority = match uri.port_u16() {
            Some(0) => return Err(expected()),
            Some(port) => format!("{host}:{port}"),
            None => host.to_string(),
        };
        let exact = uri.authority().is_some_and(|found| found.as_str() == authority);
        if exact && uri.scheme_str() == Some("http") { Ok(Url(uri)) } else { Err(expected()) }
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Why a request did not do what it was for.
#[derive(Debug)]
pub struct Problem {
    what: String,
    /// It may be over soon.
    pub passing: bool,
    /// Nobody listens.
    pub refused: bool,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

/// The request's method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Asks.
    Get,
    /// Tells, without a body.
    Post,
}

/// Asks and tells the proxy.
#[derive(Debug)]
pub struct ProxyApi {
    agent: Agent,
    loopback: Loopback,
    /// One of the two addresses has answered, and the other is not asked any more.
    kept: bool,
}

impl ProxyApi {
    /// No request is made yet.
    #[must_use]
    pub fn new() -> ProxyApi {
        let loopback = Loopback::default();
        let config = Config::builder()
            .proxy(None)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .timeout_global(Some(REQUEST_TIMEOUT))
            .max_response_header_size(LONGEST_HEAD)
            .input_buffer_size(LONGEST_HEAD)
            .max_idle_connections(0)
            .user_agent(concat!("outlast/", env!("CARGO_PKG_VERSION")))
            .build();
        let agent = Agent::with_parts(config, TcpConnector::default(), loopback.clone());
        ProxyApi { agent, loopback, kept: false }
    }

    /// Makes one request; returns the status. 127.0.0.1 is asked first, then `::1` where nothing listens there.
    ///
    /// # Errors
    /// No answer within the time, or none that is HTTP.
    pub fn request(&mut self, method: Method, url: &Url) -> Result<u16, Problem> {
        let mut answer = self.once(method, url);
        let mut refused = self.is_refusal(&answer);
        if refused && !self.kept {
            self.loopback.swap();
            let second = self.once(method, url);
            let second_refused = self.is_refusal(&second);
            if second.is_err() {
                self.loopback.swap();
            }
            // Where there is no IPv6, that is not what is wrong.
            if !second_refused {
                (answer, refused) = (second, false);
            }
        }
        self.kept |= answer.is_ok();
        answer.map_err(|error| Problem {
            passing: true,
            refused,
            what: match error {
                Error::Timeout(_) => format!("no answer within {REQUEST_TIMEOUT:?}"),
                error => error.to_string(),
            },
        })
    }

    /// Tells the proxy something.
    ///
    /// # Errors
    /// As for [`ProxyApi::request`], and for every answer but 200.
    pub fn tell(&mut self, url: &Url) -> Result<(), Problem> {
        match self.request(Method::Post, url)? {
            200 => Ok(()),
            status => {
                Err(Problem { what: format!("status {status}"), passing: status >= 500, refused: false })
            }
        }
    }

    /// Whether the port of a URL refuses connections on both addresses: its server is gone.
    #[must_use]
    pub fn nobody_listens(url: &Url) -> bool {
        let port = url.0.port_u16().unwrap_or(80);
        let ips: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
        // On loopback a port without a listener refuses at once; anything else may still be a server.
        ips.iter().all(|ip| {
            TcpStream::connect_timeout(&SocketAddr::new(*ip, port), REQUEST_TIMEOUT)
                .is_err_and(|error| nobody_there(*ip, &error))
        })
    }

    /// Whether the address that was asked last has nobody to answer.
    fn is_refusal(&self, answer: &Result<u16, Error>) -> bool {
        matches!(answer, Err(Error::Io(error)) if nobody_there(self.loopback.ip(), error))
    }

    fn once(&self, method: Method, url: &Url) -> Result<u16, Error> {
        let method = match method {
            Method::Get => "GET",
            Method::Post => "POST",
        };
        let request = Request::builder().method(method).uri(url.0.clone()).header("connection", "close");
        Ok(self.agent.run(request.body(())?)?.status().as_u16())
    }
}

impl Default for ProxyApi {
    fn default() -> ProxyApi {
        ProxyApi::new()
    }
}

/// A port that nobody has, or a family of addresses that this host does not know. That 127.0.0.1 cannot be had says only
/// that somebody has taken all ports towards it.
fn nobody_there(ip: IpAddr, error: &io::Error) -> bool {
    match error.raw_os_error() {
        Some(libc::ECONNREFUSED | libc::EAFNOSUPPORT | libc::ENETUNREACH) => true,
        Some(libc::EADDRNOTAVAIL) => ip.is_ipv6(),
        _ => false,
    }
}

/// Whatever a URL says, its host is this one: 127.0.0.1 or `::1`.
#[derive(Clone, Debug, Default)]
struct Loopback {
    v6: Arc<AtomicBool>,
}

impl Loopback {
    fn swap(&self) {
        self.v6.fetch_xor(true, Relaxed);
    }

    fn ip(&self) -> IpAddr {
        if self.v6.load(Relaxed) { Ipv6Addr::LOCALHOST.into() } else { Ipv4Addr::LOCALHOST.into() }
    }
}

impl Resolver for Loopback {
    fn resolve(&self, uri: &Uri, _: &Config, _: NextTimeout) -> Result<ResolvedSocketAddrs, Error> {
        let mut addresses = self.empty();
        addresses.push(SocketAddr::new(self.ip(), uri.port_u16().unwrap_or(80)));
        Ok(addresses)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_of_this_host() {
        for text in ["http://127.0.0.1:15021/healthz/ready", "http://[::1]:80/", "http://localhost/x?y"] {
            assert_eq!(
                Url::parse(text).unwrap().to_string().trim_end_matches('/'),
                text.trim_end_matches('/')
            );
        }
        for text in [
            "",
            "15021",
            "127.0.0.1:15021",
            "https://127.0.0.1/",
            "http://10.0.0.1/",
            "http://example.com/",
            "http:///x",
            "http://127.0.0.1:0/",
            "http://127.0.0.1:99999/",
            "http://user@127.0.0.1/",
            "http://127.0.0.1.evil/",
            "ftp://localhost/",
            "http://127.0.0.1:x/",
            "http://127.0.0.1/ x",
            "/healthz",
        ] {
            assert!(Url::parse(text).is_err(), "{text}");
        }
    }
}
