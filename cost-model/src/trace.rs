//! Timelines as Chrome trace JSON, which Perfetto reads: a process per stage, a thread per
//! stream, complete events in microseconds.

use crate::TimelineEvent;
use ir::program::Stream;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Writes at most `max_events` of `events` (in their order) as a trace. `otherData` says how
/// many were left out.
pub fn chrome_trace(events: &[TimelineEvent], max_events: usize) -> String {
    let shown = &events[..events.len().min(max_events)];
    let stages: BTreeSet<u32> = shown.iter().map(|e| e.stage.0).collect();
    let mut all: Vec<Value> = stages.iter().flat_map(|&s| names(s)).collect();
    all.extend(shown.iter().map(event));
    json!({
        "displayTimeUnit": "ms",
        "otherData": { "events_left_out": events.len() - shown.len() },
        "traceEvents": all,
    })
    .to_string()
}

const STREAMS: [(Stream, &str); 3] = [
    (Stream::Compute, "compute"),
    (Stream::Collective, "collective"),
    (Stream::Transfer, "transfer"),
];

fn tid(stream: Stream) -> usize {
    STREAMS
        .iter()
        .position(|s| s.0 == stream)
        .unwrap_or(STREAMS.len())
}

fn names(stage: u32) -> Vec<Value> {
    let meta = |name: &str, tid: usize, value: &str| json!({ "ph": "M", "pid": stage, "tid": tid, "name": name, "args": { "name": value } });
    let mut all = vec![meta("process_name", 0, &format!("stage {stage}"))];
    all.extend(
        STREAMS
            .iter()
            .enumerate()
            .map(|(i, s)| meta("thread_name", i, s.1)),
    );
    all
}

fn event(e: &TimelineEvent) -> Value {
    json!({
        "ph": "X",
        "pid": e.stage.0,
        "tid": tid(e.stream),
        "name": e.name,
        "ts": e.start_s * 1e6,
        "dur": e.duration_s * 1e6,
        "args": { "microbatch": e.microbatch, "template": e.template, "instruction": e.instruction },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::StageId;

    #[test]
    fn events_become_complete_events_and_the_rest_is_counted() {
        let e = TimelineEvent {
            stage: StageId(1),
            stream: Stream::Transfer,
            template: 3,
            instruction: Some(2),
            microbatch: Some(7),
            name: "send \"h.0\"".into(),
            start_s: 0.001,
            duration_s: 2e-6,
        };
        let trace: Value = serde_json::from_str(&chrome_trace(&[e.clone(), e], 1)).unwrap();
        assert_eq!(trace["otherData"]["events_left_out"], 1);
        let events = trace["traceEvents"].as_array().unwrap();
        // One process name, three thread names, one event.
        assert_eq!(events.len(), 5);
        let last = &events[4];
        assert_eq!(
            (last["pid"].as_u64(), last["tid"].as_u64()),
            (Some(1), Some(2))
        );
        assert_eq!(
            (last["ts"].as_f64(), last["dur"].as_f64()),
            (Some(1000.0), Some(2.0))
        );
        assert_eq!(last["args"]["microbatch"], 7);
        assert_eq!(last["name"], "send \"h.0\"");
    }
}
