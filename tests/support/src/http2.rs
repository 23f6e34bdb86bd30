//! As much of HTTP/2 without TLS as the fixture needs on both ends.

use crate::client::{CONNECT, LOOK};
use bytes::Bytes;
use h2::client::SendRequest;
use h2::{Reason, server};
use http::{Request, Response, StatusCode};
use std::future::{Future, poll_fn};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;

/// A client with one connection, or a new one when the server wants that.
#[derive(Debug)]
pub(crate) struct Client {
    addr: SocketAddr,
    gone: Arc<AtomicBool>,
    /// With a thread of its own that drives the connection; what is opened is opened by the callers, in their network.
    runtime: Option<Runtime>,
    sender: Mutex<Option<SendRequest<Bytes>>>,
}

impl Client {
    pub(crate) fn new(addr: SocketAddr, gone: Arc<AtomicBool>) -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
        Self { addr, gone, runtime: Some(runtime), sender: Mutex::default() }
    }

    /// The length of the answer's body. A request that the server says it has not taken goes out again, as RFC 9113
    /// (8.7) has it.
    pub(crate) fn get(&self, path: &str) -> io::Result<(usize, bool)> {
        let runtime = self.runtime.as_ref().expect("not dropped");
        for _ in 0..5 {
            let sender = self.sender()?;
            match runtime.block_on(self.patiently(ask(sender, self.addr, path)))? {
                Ok((StatusCode::OK, length)) => return Ok((length, false)),
                Ok((status, _)) => return Err(io::Error::other(status.to_string())),
                Err(error) if not_taken(&error) => *self.sender.lock().unwrap() = None,
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        Err(io::Error::other("not taken, five times"))
    }

    fn sender(&self) -> io::Result<SendRequest<Bytes>> {
        let mut sender = self.sender.lock().unwrap();
        if sender.is_none() {
            let stream = TcpStream::connect_timeout(&self.addr, CONNECT)?;
            stream.set_nonblocking(true)?;
            let shake = async {
                let stream = tokio::net::TcpStream::from_std(stream)?;
                let (new, connection) = h2::client::handshake(stream).await.map_err(io::Error::other)?;
                tokio::spawn(connection);
                Ok::<_, io::Error>(new)
            };
            *sender = Some(self.runtime.as_ref().expect("not dropped").block_on(shake)?);
        }
        Ok(sender.clone().expect("made"))
    }

    /// As long as the Pod's network exists.
    async fn patiently<T>(&self, answer: impl Future<Output = T>) -> io::Result<T> {
        let mut answer = pin!(answer);
        loop {
            let gone = self.gone.load(Ordering::Relaxed);
            match tokio::time::timeout(LOOK, answer.as_mut()).await {
                Ok(done) => return Ok(done),
                Err(_) if gone => return Err(io::Error::other("cut: the Pod's network is gone")),
                Err(_) => {}
            }
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // The last request's thread, which is none of the runtime's, does not wait for a connection to end.
        self.runtime.take().expect("not dropped").shutdown_background();
    }
}

async fn ask(
    sender: SendRequest<Bytes>,
    addr: SocketAddr,
    path: &str,
) -> Result<(StatusCode, usize), h2::Error> {
    let mut sender = sender.ready().await?;
    let request = Request::get(format!("http://{addr}{path}")).body(()).expect("a request");
    let (answer, _) = sender.send_request(request, true)?;
    let answer = answer.await?;
    let status = answer.status();
    let (mut body, mut length) = (answer.into_body(), 0);
    while let Some(bytes) = body.data().await.transpose()? {
        length += bytes.len();
        body.flow_control().release_capacity(bytes.len())?;
    }
    Ok((status, length))
}

/// The server has not begun with it, or the connection had been ended in good order before it was sent.
fn not_taken(error: &h2::Error) -> bool {
    error.reason() == Some(Reason::REFUSED_STREAM)
        || error.is_go_away() && error.reason() == Some(Reason::NO_ERROR)
}

/// Serves a connection: `body` says after how long a path is answered, and with what. Ends in good order once `stop`
/// is true, after the last answer.
pub fn serve(
    stream: TcpStream,
    stop: watch::Receiver<bool>,
    body: impl Fn(&str) -> (Duration, Vec<u8>) + Send + Sync + 'static,
) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    let runtime = Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let stream = tokio::net::TcpStream::from_std(stream)?;
        answer_all(stream, stop, body).await.map_err(io::Error::other)
    })
}

async fn answer_all(
    stream: tokio::net::TcpStream,
    mut stop: watch::Receiver<bool>,
    body: impl Fn(&str) -> (Duration, Vec<u8>) + Send + Sync + 'static,
) -> Result<(), h2::Error> {
    let mut connection = server::handshake(stream).await?;
    let mut stopped = pin!(stop.wait_for(|stop| *stop));
    let mut stopping = false;
    loop {
        let next = poll_fn(|context| {
            if !stopping && stopped.as_mut().poll(context).is_ready() {
                stopping = true;
                connection.graceful_shutdown();
            }
            connection.poll_accept(context)
        });
        let next = next.await;
        let Some((request, mut to)) = next.transpose()? else { return Ok(()) };
        let target = request.uri().path_and_query().map_or("/", |target| target.as_str());
        let (delay, bytes) = body(target);
        tokio::spawn(async move {
            tokio::time::sleep(delay).await;
            // A client that has gone away has no use for it.
            if let Ok(mut stream) = to.send_response(Response::new(()), false) {
                let _ = stream.send_data(bytes.into(), true);
            }
        });
    }
}
