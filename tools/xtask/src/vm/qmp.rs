//! QEMU's control protocol, as much of it as tests need.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// A connection to QEMU. QEMU serves one at a time.
#[derive(Debug)]
pub struct Qmp {
    reader: BufReader<UnixStream>,
    events: Vec<Value>,
}

impl Qmp {
    /// Connects to the socket at `path`.
    pub(super) fn connect(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path)
            .with_context(|| format!("cannot connect to QEMU at {}", path.display()))?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        let mut qmp = Self {
            reader: BufReader::new(stream),
            events: Vec::new(),
        };
        let greeting = qmp.line()?;
        if greeting.get("QMP").is_none() {
            bail!("QEMU greeted with {greeting}");
        }
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Executes a command and returns what it returned.
    ///
    /// # Errors
    ///
    /// QEMU's refusal, or a connection that broke or stayed silent for 20 s.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let request = json!({"execute": command, "arguments": arguments});
        self.reader
            .get_mut()
            .write_all(format!("{request}\n").as_bytes())
            .context("cannot send a QMP command")?;
        loop {
            let mut answer = self.line()?;
            if let Some(error) = answer.get("error") {
                bail!(
                    "QEMU refused {command}: {}",
                    error["desc"].as_str().unwrap_or_default()
                );
            }
            if answer.get("return").is_some() {
                return Ok(answer["return"].take());
            }
            self.events.push(answer);
        }
    }

    /// Executes a command of the human monitor, such as `pcie_aer_inject_error rp1 COMP_TIME`, and returns what it printed.
    ///
    /// # Errors
    ///
    /// As [`execute`](Self::execute).
    pub fn monitor(&mut self, line: &str) -> Result<String> {
        let printed = self.execute("human-monitor-command", json!({"command-line": line}))?;
        Ok(printed.as_str().unwrap_or_default().to_owned())
    }

    /// Events that came with the answers so far; they are handed out once.
    pub fn take_events(&mut self) -> Vec<Value> {
        std::mem::take(&mut self.events)
    }

    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        match self
            .reader
            .read_line(&mut line)
            .context("QEMU does not answer on its control socket")?
        {
            0 => bail!("QEMU closed its control socket"),
            _ => serde_json::from_str(&line).with_context(|| format!("QEMU sent no JSON: {line}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn events_do_not_pass_for_answers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut requests = BufReader::new(stream.try_clone().unwrap()).lines();
            stream.write_all(b"{\"QMP\":{}}\n").unwrap();
            requests.next();
            stream.write_all(b"{\"return\":{}}\n").unwrap();
            requests.next();
            stream
                .write_all(b"{\"event\":\"RESET\"}\n{\"return\":{\"status\":\"running\"}}\n")
                .unwrap();
            requests.next();
            stream
                .write_all(b"{\"error\":{\"desc\":\"no such device\"}}\n")
                .unwrap();
        });
        let mut qmp = Qmp::connect(&path).unwrap();
        assert_eq!(
            qmp.execute("query-status", json!({})).unwrap()["status"],
            "running"
        );
        assert_eq!(qmp.take_events().len(), 1);
        let error = qmp.execute("device_del", json!({"id": "x"})).unwrap_err();
        assert!(error.to_string().contains("no such device"));
        server.join().unwrap();
    }
}
