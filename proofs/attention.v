(** Softmax attention over a set of tokens. *)
From Coq Require Import Reals Lra.
From mathcomp Require Import all_ssreflect.
From Locks Require Import real_sum lse.
Set Implicit Arguments.
Unset Strict Implicit.
Unset Printing Implicit Defensive.
Local Open Scope R_scope.

Section Attention.
Variables (I : finType) (Dv : nat).
Implicit Types (A : {set I}) (x : I -> R) (v : I -> vec Dv).

(** sum over the tokens of A of exp(x_i) / mass * v_i *)
Definition attention A x v : vec Dv := fun j => \sum_(i in A) exp (x i) / mass A x * v i j.

(** The same before it is divided by the mass. *)
Definition weighted A x v : vec Dv := fun j => \sum_(i in A) exp (x i) * v i j.

Lemma attentionE A x v j : attention A x v j = weighted A x v j / mass A x.
Proof.
by rewrite /attention /weighted /Rdiv -sum_scale_r; apply: eq_bigr => i _; lra.
Qed.

Lemma weightedE A x v j : A != set0 -> weighted A x v j = mass A x * attention A x v j.
Proof. by move=> A0; rewrite attentionE; have := mass_gt0 x A0 => m0; field; lra. Qed.

(** The share of the softmax mass of the whole context that the tokens of A hold. *)
Definition share A x : R := mass A x / mass [set: I] x.

(** The tokens of the pages in [kept], where [page] says which page a token is on. *)
Definition tokens_of (N : nat) (page : I -> 'I_N) (kept : {set 'I_N}) : {set I} :=
  [set i | page i \in kept].

Lemma mass_setC A x : mass [set: I] x = mass A x + mass (~: A) x.
Proof. by rewrite -mass_disjoint ?setUCr // -setI_eq0 setICr. Qed.

Lemma weighted_setC A x v j :
  weighted [set: I] x v j = weighted A x v j + weighted (~: A) x v j.
Proof.
rewrite /weighted (bigID (mem A)) /=.
by congr (_ + _); apply: eq_bigl => i; rewrite !inE.
Qed.

Lemma share_gt0 A x : A != set0 -> 0 < share A x.
Proof.
move=> A0; have m0 := mass_gt0 x A0; apply: Rdiv_lt_0_compat => //.
by rewrite (mass_setC A); have := mass_ge0 (~: A) x; lra.
Qed.

Lemma share_le1 A x : A != set0 -> share A x <= 1.
Proof.
move=> A0; have m0 := mass_gt0 x A0; have r0 := mass_ge0 (~: A) x.
rewrite /share (mass_setC A); apply: (Rmult_le_reg_r (mass A x + mass (~: A) x)); first lra.
by rewrite Rmult_1_l /Rdiv Rmult_assoc Rinv_l; lra.
Qed.

End Attention.
