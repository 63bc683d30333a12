//! Pins that a plan states and does not keep: its list was edited, or its stages were.

use super::Pins;
use ir::LogicalMesh;
use ir::plan::{Plan, ScheduleKind};
use ir::training::Recompute;

impl Pins {
    /// The pins that `plan` does not keep, each with what the plan has in its place: degrees, stages,
    /// microbatches, the schedule, and whether anything is recomputed. Layouts of single tensors and
    /// ZeRO levels, which leave open how they are met, are not looked at.
    pub fn unkept(&self, plan: &Plan) -> Vec<(String, String)> {
        let mut unkept = self.unkept_degrees(plan);
        let mut keep = |is_kept: bool, pin: String, has: String| {
            if !is_kept {
                unkept.push((pin, has));
            }
        };
        if let Some(n) = self.pipeline {
            let meshes = plan.n_meshes();
            let has = format!("pipeline={meshes}");
            keep(meshes == n as usize, format!("pipeline={n}"), has);
        }
        if let Some(n) = self.microbatch {
            let has = format!("microbatch={}", plan.microbatch);
            keep(plan.microbatch == n, format!("microbatch={n}"), has);
        }
        if let Some(split) = &self.split {
            let of_stage = |s: &ir::plan::StagePlan| s.runs.iter().map(|r| r.count as usize).sum();
            let has: Vec<usize> = plan.stages.iter().map(of_stage).collect();
            let shown = |counts: &[usize]| {
                let counts: Vec<String> = counts.iter().map(usize::to_string).collect();
                counts.join("/")
            };
            let pin = format!("split={}", shown(split));
            keep(*split == has, pin, format!("split={}", shown(&has)));
        }
        let interleaves = matches!(plan.schedule, ScheduleKind::Interleaved { .. });
        if let Some(schedule) = self.schedule {
            let own = schedule == ScheduleKind::OneFOneB && interleaves;
            let pin = format!("schedule={}", schedule.name());
            let has = format!("schedule={}", plan.schedule.name());
            keep(own || plan.schedule == self.schedule_kind(), pin, has);
        }
        if let Some(v) = self.virtual_stages {
            let has = plan.schedule.virtual_stages();
            let is_kept = if v > 1 { has == v } else { !interleaves };
            keep(is_kept, format!("virtual={v}"), format!("virtual={has}"));
        }
        if self.recompute == Some(Recompute::None) && self.recompute_ops.is_empty() {
            let mut ops = plan.layer_strategies.iter().flat_map(|s| &s.recompute);
            let twin = ops.next();
            let has = twin.map(|op| format!("{op} recomputed"));
            keep(
                has.is_none(),
                "recompute=none".into(),
                has.unwrap_or_default(),
            );
        }
        unkept
    }

    /// Those of them that are degrees of every mesh.
    fn unkept_degrees(&self, plan: &Plan) -> Vec<(String, String)> {
        let size = |mesh: &LogicalMesh, name: &str| {
            let axis = mesh.axes.iter().find(|a| a.name == name);
            axis.map_or(1, |a| a.size)
        };
        let degrees = [
            ("data", self.data),
            ("replicas", self.replicas),
            ("expert", self.expert),
            ("context", self.context),
            ("tensor", self.tensor),
        ];
        let unkept = degrees.iter().filter_map(|(name, degree)| {
            let n = (*degree)?;
            // Ranks that split experts and those with copies are among those that split samples.
            let own = |mesh: &LogicalMesh| match *name {
                "data" => ["replica", "data", "expert"]
                    .iter()
                    .fold(1, |n: u32, axis| n.saturating_mul(size(mesh, axis))),
                "replicas" => size(mesh, "replica"),
                name => size(mesh, name),
            };
            let other = plan.meshes().map(own).find(|has| *has != n)?;
            Some((format!("{name}={n}"), format!("{name}={other}")))
        });
        unkept.collect()
    }
}
