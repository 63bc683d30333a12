//! The roofline of a plan's program, kind by kind, in words and a table for each mesh.

use super::plan::stages_of_mesh;
use super::{count, percent, table};
use crate::failure::Failure;
use crate::plan_file::Loaded;
use crate::software::{Arranged, whose_plan};
use cost_model::compute::peak_of;
use cost_model::roofline::{MeshRoofline, Row, roofline};
use ir::plan::Plan;
use ir::{Bytes, Seconds, counted};
use runtime::device::cuda::launches;
use serde::Serialize;

/// The roofline of every mesh, and what it is relative to.
#[derive(Clone, Debug, Serialize)]
pub struct Rooflines {
    /// FLOP/s of the data sheet for products in the training's precision, on the first mesh.
    pub peak_flops_per_s: f64,
    /// Bytes per second of that device's memory, as the data sheet has them.
    pub memory_bytes_per_s: f64,
    /// Mesh by mesh.
    pub meshes: Vec<Mesh>,
}

/// One mesh.
#[derive(Clone, Debug, Serialize)]
pub struct Mesh {
    /// Kinds of instructions, those that take longest first.
    #[serde(flatten)]
    pub of: MeshRoofline,
    /// All of them.
    pub total: Row,
}

impl Rooflines {
    /// The rooflines of a plan's program. Launches are those of Meshwright's CUDA backend, so other
    /// software has none.
    pub fn of(loaded: &Loaded) -> Result<Self, Failure> {
        let plan = &loaded.plan;
        let arranged = Arranged::of(plan, &loaded.program)?;
        let costs = arranged.costs(&plan.cluster)?;
        let is_own = plan.made_for.is_none();
        let meshes = roofline(
            &arranged.program,
            &plan.cluster,
            &costs,
            &|role| match is_own {
                true => launches(role),
                false => Vec::new(),
            },
        )?;
        let first = arranged.program.roles.first();
        let seen = first.map(|role| plan.cluster.seen_by(role.mesh.devices));
        let seen = seen.as_deref().unwrap_or(&plan.cluster);
        let mesh = |of: MeshRoofline| Mesh {
            total: of.total(),
            of,
        };
        Ok(Rooflines {
            peak_flops_per_s: peak_of(seen, plan.train.precision.compute()),
            memory_bytes_per_s: seen.device.memory_bandwidth_bytes_per_s,
            meshes: meshes.into_iter().map(mesh).collect(),
        })
    }

    /// Says what the instructions of a rank take at least, and what is predicted.
    pub fn verdict(&self, plan: &Plan) -> String {
        let slowest = self.meshes.iter().max_by(|a, b| {
            let floor = |m: &Mesh| m.total.floor_s.unwrap_or(0.0);
            floor(a).total_cmp(&floor(b))
        });
        let Some(mesh) = slowest else {
            return "The program has no instructions.".into();
        };
        let floor_s = mesh.total.floor_s.unwrap_or(0.0);
        let step_s = plan.predicted.step_time_s.0;
        let launched = match mesh.total.launches {
            Some(n) => format!(
                "{} are {}.",
                counted(mesh.total.count, "instruction"),
                counted(n, "launch")
            ),
            None => format!("There are {}.", counted(mesh.total.count, "instruction")),
        };
        format!(
            "{}{}FLOP/s and {}B/s leave the instructions of the busiest rank no less than {}, one after the other; the step of {} is predicted at {} of that rate. {launched}",
            whose_plan(plan),
            count(self.peak_flops_per_s),
            count(self.memory_bytes_per_s),
            Seconds(floor_s),
            Seconds(step_s),
            percent(floor_s / step_s.max(f64::MIN_POSITIVE)),
        )
    }

    /// Draws a table for each mesh.
    pub fn tables(&self, plan: &Plan) -> String {
        let mut out = String::new();
        for (i, mesh) in self.meshes.iter().enumerate() {
            if self.meshes.len() > 1 {
                let stages = stages_of_mesh(i, self.meshes.len(), plan.schedule);
                let ranks = mesh.of.n_ranks;
                out += &format!("\nStage {stages}, one rank of {ranks}\n");
            }
            let rows = mesh.of.rows.iter().chain([&mesh.total]).map(cells);
            out += &table(&HEADER, rows.collect(), 1);
            out.push('\n');
        }
        out.truncate(out.trim_end().len());
        out
    }

    /// Says how the table is to be read.
    pub fn reading(&self, plan: &Plan) -> String {
        let fused = match plan.made_for.is_none() {
            true => {
                " What is kept on the chip is what one op has inside, as attention's scores, a norm's row, AdamW's states and the exponentials of a loss, and what a product and the ops behind it hand on in one call. Neighbours of one kind that go through many tensors share launches, which the first of them has."
            }
            false => " Launches are counted for Meshwright's own runtime alone.",
        };
        let fused = match self.meshes.iter().map(|m| m.total.fused).sum::<u64>() {
            0 => fused.to_string(),
            n => format!(
                "{fused} {} of a rank of each mesh {} fused with others: predicted to take less than {} own operands would, {} counted and {} no floor.",
                counted(n, "instruction"),
                if n == 1 { "is" } else { "are" },
                if n == 1 { "its" } else { "their" },
                if n == 1 { "it is" } else { "they are" },
                if n == 1 { "has" } else { "have" },
            ),
        };
        format!(
            "Each instruction's floor is the longer of its products at the peak and its bytes at the bandwidth, every operand and result moved once; the prediction has efficiencies and launches.{fused} Collectives and transfers are bound by links and have no floor here."
        )
    }
}

const HEADER: [&str; 7] = [
    "kind",
    "count",
    "launches",
    "FLOP",
    "bytes",
    "floor",
    "predicted",
];

fn cells(row: &Row) -> Vec<String> {
    let none = || "-".to_string();
    vec![
        row.kind.clone(),
        row.count.to_string(),
        row.launches.map_or_else(none, |n| n.to_string()),
        match row.flops > 0.0 {
            true => count(row.flops).trim_end().to_string(),
            false => none(),
        },
        Bytes(row.bytes as u64).to_string(),
        row.floor_s.map_or_else(none, |s| Seconds(s).to_string()),
        Seconds(row.predicted_s).to_string(),
    ]
}
