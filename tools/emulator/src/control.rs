//! The control socket: a line of words in, a line of JSON out, so that a test or a person scripts
//! the device while a driver has it.
//!
//! | request | reply |
//! | --- | --- |
//! | `stats` | `{"stats":{...}}`: [`Stats`] |
//! | `stray` | `{"stray":{...}}`: [`StrayDma`] |
//! | `reset-counters` | `{"ok":true}` |
//! | `link up`, `link down` | `{"ok":true}` |
//! | `notice error`, `notice request` | `{"ok":true}`; the client's error or request event fires |
//! | `fault NAME[:ARG...][@TRIGGER]` or `fault NAME ARG ... @ TRIGGER` | `{"ok":true}` |
//! | `clear-faults` | `{"ok":true}` |
//! | `log N` | `{"log":[...]}`: the latest N accesses that faults made, [`LogEntry`] |
//! | `phase WORD` | `{"ok":true}`; a mark in the log |
//! | `power-cycle` | `{"ok":true}`; the device is off and on, its faults stay |
//! | `faults` | `{"faults":[...]}`: every fault that there is |
//! | `leash` | `{"ok":true}`; when this connection ends, the emulator does |
//! | `quit` | `{"ok":true}`; the emulator ends |
//!
//! What cannot be done is answered `{"error":"..."}`. With two ports, `port 1` before a request
//! means the second.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::faults::{Spec, TABLE};
use crate::server::irqs::Notice;
use crate::server::port::{Handle, Request};
use crate::stats::{LogEntry, Stats, StrayDma};

/// The longest request, in bytes.
const LONGEST: u64 = 4096;
/// Connections at once.
const CONNECTIONS: usize = 16;
/// How long a client of the control socket waits for a reply.
const PATIENCE: Duration = Duration::from_secs(10);

/// A reply, as it stands on its line.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// It was done.
    Ok(bool),
    /// What is counted.
    Stats(Box<Stats>),
    /// DMA outside what the client mapped.
    Stray(StrayDma),
    /// Accesses that faults made, oldest first.
    Log(Vec<LogEntry>),
    /// Every fault: its form, and what it does.
    Faults(Vec<(String, String)>),
    /// It was not done, and why.
    Error(String),
}

/// Listens for control connections, each on a thread of its own, and hands requests to the ports.
/// Returns at once. With `leash`, the ports are stopped when nobody has asked for the leash by
/// then: whoever started them died before it could.
///
/// # Errors
///
/// When no thread can be started.
pub fn serve(
    listener: UnixListener,
    ports: Vec<Handle>,
    leash: Option<Duration>,
) -> io::Result<()> {
    let connections = Arc::new(AtomicUsize::new(0));
    let leashed = Arc::new(AtomicBool::new(false));
    if let Some(patience) = leash {
        let (ports, leashed) = (ports.clone(), Arc::clone(&leashed));
        std::thread::Builder::new()
            .name("leash".to_owned())
            .spawn(move || {
                std::thread::sleep(patience);
                if !leashed.load(Ordering::Relaxed) {
                    log::warn!("nobody took the leash");
                    stop(&ports);
                }
            })?;
    }
    std::thread::Builder::new()
        .name("control".to_owned())
        .spawn(move || {
            for socket in listener.incoming() {
                let Ok(socket) = socket else { return };
                if connections.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS {
                    connections.fetch_sub(1, Ordering::Relaxed);
                    continue;
                }
                let (ports, counter) = (ports.clone(), Arc::clone(&connections));
                let leashed = Arc::clone(&leashed);
                let started = std::thread::Builder::new()
                    .name("control connection".to_owned())
                    .spawn(move || {
                        if let Err(error) = converse(&socket, &ports, &leashed) {
                            log::debug!("a control connection failed: {error}");
                        }
                        counter.fetch_sub(1, Ordering::Relaxed);
                    });
                if started.is_err() {
                    connections.fetch_sub(1, Ordering::Relaxed);
                }
            }
        })?;
    Ok(())
}

fn converse(socket: &UnixStream, ports: &[Handle], anyone: &AtomicBool) -> io::Result<()> {
    let mut leashed = false;
    let ended = answer_all(socket, ports, anyone, &mut leashed);
    // However it ended: who died may not have read the answer.
    if leashed {
        stop(ports);
    }
    ended
}

fn answer_all(
    socket: &UnixStream,
    ports: &[Handle],
    anyone: &AtomicBool,
    leashed: &mut bool,
) -> io::Result<()> {
    let mut reader = BufReader::new(socket);
    loop {
        let mut line = Vec::new();
        let read = reader.by_ref().take(LONGEST).read_until(b'\n', &mut line);
        if !matches!(read, Ok(n) if n > 0 && line.ends_with(b"\n")) {
            return read.map(drop);
        }
        let line = String::from_utf8_lossy(&line);
        let words: Vec<&str> = line.split_whitespace().collect();
        if words == ["leash"] {
            *leashed = true;
            anyone.store(true, Ordering::Relaxed);
        }
        let reply = answer(&words, ports);
        let mut text = serde_json::to_string(&reply)?;
        text.push('\n');
        let mut writer = socket;
        writer.write_all(text.as_bytes())?;
        if words == ["quit"] {
            stop(ports);
        }
    }
}

fn stop(ports: &[Handle]) {
    for port in ports {
        port.send(Request::Stop);
    }
}

fn answer(words: &[&str], ports: &[Handle]) -> Reply {
    let (number, words) = match words {
        ["port", number, rest @ ..] => (number.parse().unwrap_or(usize::MAX), rest),
        _ => (0, words),
    };
    let Some(port) = ports.get(number) else {
        return Reply::Error(format!("there is no such port; there are {}", ports.len()));
    };
    match words {
        ["stats"] => match port.stats() {
            Some(stats) => Reply::Stats(Box::new(stats)),
            None => Reply::Error("the port has ended or does not answer".to_owned()),
        },
        ["stray"] => match port.stats() {
            Some(stats) => Reply::Stray(stats.stray),
            None => Reply::Error("the port has ended or does not answer".to_owned()),
        },
        ["reset-counters"] => done(port, Request::ResetCounters),
        ["link", "up"] => done(port, Request::Link(true)),
        ["link", "down"] => done(port, Request::Link(false)),
        ["notice", "error"] => done(port, Request::Notice(Notice::Error)),
        ["notice", "request"] => done(port, Request::Notice(Notice::Request)),
        ["fault", words @ ..] if !words.is_empty() => match Spec::from_words(words) {
            Ok(spec) => done(port, Request::Fault(spec)),
            Err(error) => Reply::Error(why(&error)),
        },
        ["log", lines] => match lines.parse().ok().map(|lines| port.log(lines)) {
            Some(Some(log)) => Reply::Log(log),
            Some(None) => Reply::Error("the port has ended or does not answer".to_owned()),
            None => Reply::Error(format!("'{lines}' is no number of lines")),
        },
        ["phase", word] => done(port, Request::Phase((*word).to_owned())),
        ["power-cycle"] => done(port, Request::PowerCycle),
        ["clear-faults"] => done(port, Request::ClearFaults),
        ["faults"] => Reply::Faults(
            TABLE
                .iter()
                .map(|entry| (entry.form(), entry.text.to_owned()))
                .collect(),
        ),
        ["leash" | "quit"] => Reply::Ok(true),
        _ => Reply::Error(format!(
            "'{}' is no request; there are stats, stray, reset-counters, link up|down, \
             notice error|request, fault NAME, clear-faults, faults, log N, phase WORD, \
             power-cycle, leash, quit",
            words.join(" ")
        )),
    }
}

/// An error with its causes.
fn why(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

fn done(port: &Handle, request: Request) -> Reply {
    if port.send(request) {
        Reply::Ok(true)
    } else {
        Reply::Error("the port has ended".to_owned())
    }
}

/// What goes wrong on a control connection.
#[derive(Debug, Error)]
pub enum ControlError {
    /// The connection failed.
    #[error("the emulator's control socket failed; it may have ended")]
    Socket(#[from] io::Error),
    /// What came back is no reply.
    #[error("the emulator's control socket answered nonsense")]
    Nonsense(#[from] serde_json::Error),
    /// The emulator says why it did not do what was asked.
    #[error("the emulator refuses '{request}': {reason}")]
    Refused {
        /// What was asked.
        request: String,
        /// Why not.
        reason: String,
    },
}

/// What a [`Client`] speaks over: a socket, or what leads to one.
pub trait Stream: Read + Write + Send + std::fmt::Debug {}

impl<T: Read + Write + Send + std::fmt::Debug> Stream for T {}

/// A client of a control socket.
#[derive(Debug)]
pub struct Client {
    reader: BufReader<Box<dyn Stream>>,
    /// A request got no reply in time: no other is waited for.
    silent: bool,
}

impl Client {
    /// Connects.
    ///
    /// # Errors
    ///
    /// When nobody listens at `path`.
    pub fn connect(path: &Path) -> Result<Self, ControlError> {
        let socket = UnixStream::connect(path)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok(Self::over(socket))
    }

    /// Speaks over a stream that leads to a control socket, such as a serial port of a guest's; a reply
    /// that does not come is waited for as long as the stream lets it.
    #[must_use]
    pub fn over(stream: impl Stream + 'static) -> Self {
        Self {
            reader: BufReader::new(Box::new(stream)),
            silent: false,
        }
    }

    /// Everything that the first port counts.
    ///
    /// # Errors
    ///
    /// [`ControlError`], also when the emulator has ended.
    pub fn stats(&mut self) -> Result<Stats, ControlError> {
        self.stats_of("stats")
    }

    pub(crate) fn stats_of(&mut self, request: &str) -> Result<Stats, ControlError> {
        match self.request(request)? {
            Reply::Stats(stats) => Ok(*stats),
            other => Err(ControlError::Refused {
                request: request.to_owned(),
                reason: format!("it answered {other:?}"),
            }),
        }
    }

    /// Makes the first port misbehave, as [`crate::faults::TABLE`] lists.
    ///
    /// # Errors
    ///
    /// [`ControlError`]; `Refused` for a fault that does not exist.
    pub fn fault(&mut self, spec: &str) -> Result<(), ControlError> {
        self.request(&format!("fault {spec}")).map(drop)
    }

    /// Ends all misbehaviour of the first port.
    ///
    /// # Errors
    ///
    /// [`ControlError`].
    pub fn clear_faults(&mut self) -> Result<(), ControlError> {
        self.request("clear-faults").map(drop)
    }

    /// Switches the first port's device off and on. Its faults stay, and so do its counters.
    ///
    /// # Errors
    ///
    /// [`ControlError`].
    pub fn power_cycle(&mut self) -> Result<(), ControlError> {
        self.request("power-cycle").map(drop)
    }

    /// Sets every counter of the first port to 0.
    ///
    /// # Errors
    ///
    /// [`ControlError`].
    pub fn reset_counters(&mut self) -> Result<(), ControlError> {
        self.request("reset-counters").map(drop)
    }

    /// Tells the first port's client of an error on the bus, or asks it for the function.
    ///
    /// # Errors
    ///
    /// [`ControlError`].
    pub fn notice(&mut self, notice: Notice) -> Result<(), ControlError> {
        let word = match notice {
            Notice::Error => "error",
            Notice::Request => "request",
        };
        self.request(&format!("notice {word}")).map(drop)
    }

    /// Sends a request and waits for its reply, for ten seconds at most on a socket.
    ///
    /// # Errors
    ///
    /// [`ControlError`]; `Refused` when the emulator answers that it cannot.
    pub fn request(&mut self, request: &str) -> Result<Reply, ControlError> {
        let line = format!("{request}\n");
        self.reader.get_mut().write_all(line.as_bytes())?;
        if self.silent {
            return Err(io::Error::from(io::ErrorKind::TimedOut).into());
        }
        let mut reply = String::new();
        self.silent = true;
        if self.reader.read_line(&mut reply)? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        self.silent = false;
        match serde_json::from_str(&reply)? {
            Reply::Error(reason) => Err(ControlError::Refused {
                request: request.to_owned(),
                reason,
            }),
            reply => Ok(reply),
        }
    }
}
